// Registers of several numbers, as vectors of GCC and Clang, whose operators work lane by lane. What has no operator is a
// function here, with one form for each instruction set.
//
// This file and those that include it are compiled once for each instruction set. All of it has internal linkage: a linker
// that merged two of these functions would put instructions into a program that its CPU does not have.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "pages are little-endian (docs/codecs.md)"
#endif

namespace kvc {
namespace {

using u8 = std::uint8_t;
using u16 = std::uint16_t;
using u32 = std::uint32_t;

// kNarrow: where a row of numbers, which is a multiple of eight, must be a whole number of registers.
#if defined(__AVX512F__)
constexpr std::size_t kLanes = 16, kNarrow = 8;
#elif defined(__AVX2__)
constexpr std::size_t kLanes = 8, kNarrow = 8;
#else
constexpr std::size_t kLanes = 4, kNarrow = 4;
#endif

typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef u32 Bits __attribute__((vector_size(4 * kLanes)));
typedef std::int32_t Ints __attribute__((vector_size(4 * kLanes)));
typedef u16 Words __attribute__((vector_size(2 * kLanes)));

typedef float NarrowFloats __attribute__((vector_size(4 * kNarrow)));
typedef u32 NarrowBits __attribute__((vector_size(4 * kNarrow)));
typedef std::int32_t NarrowInts __attribute__((vector_size(4 * kNarrow)));
typedef u16 NarrowWords __attribute__((vector_size(2 * kNarrow)));
typedef u8 NarrowBytes __attribute__((vector_size(kNarrow)));

#define KVC_INLINE inline __attribute__((always_inline))

template <typename To, typename From>
KVC_INLINE To as(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

template <typename To>
KVC_INLINE To load(const void* from) {
    To to;
    std::memcpy(&to, from, sizeof to);
    return to;
}

template <typename From>
KVC_INLINE void store(void* into, From from) {
    std::memcpy(into, &from, sizeof from);
}

// As `store`, past the caches, to a multiple of the register's size.
KVC_INLINE void stream(u8* into, Bits from) {
#if defined(__AVX512F__)
    _mm512_stream_si512(reinterpret_cast<__m512i*>(into), as<__m512i>(from));
#elif defined(__AVX2__)
    _mm256_stream_si256(reinterpret_cast<__m256i*>(into), as<__m256i>(from));
#elif defined(__x86_64__)
    _mm_stream_si128(reinterpret_cast<__m128i*>(into), as<__m128i>(from));
#else
    store(into, from);
#endif
}

// A difference, since minus zero plus zero is zero.
KVC_INLINE Floats all(float value) { return value - Floats{}; }
KVC_INLINE NarrowFloats narrow(float value) { return value - NarrowFloats{}; }

// kLanes numbers of 16 bits, each in a lane of 32.
KVC_INLINE Bits words(const u8* from) {
#if defined(__AVX512F__)
    return as<Bits>(_mm512_cvtepu16_epi32(load<__m256i>(from)));
#elif defined(__AVX2__)
    return as<Bits>(_mm256_cvtepu16_epi32(load<__m128i>(from)));
#else
    return __builtin_convertvector(load<Words>(from), Bits);
#endif
}

KVC_INLINE NarrowBits narrow_words(const u8* from) {
#if defined(__AVX2__)
    return as<NarrowBits>(_mm256_cvtepu16_epi32(load<__m128i>(from)));
#else
    return __builtin_convertvector(load<NarrowWords>(from), NarrowBits);
#endif
}

KVC_INLINE NarrowFloats least(NarrowFloats a, NarrowFloats b) { return a < b ? a : b; }
KVC_INLINE NarrowFloats most(NarrowFloats a, NarrowFloats b) { return a > b ? a : b; }
KVC_INLINE NarrowInts clamp(NarrowInts value, std::int32_t low, std::int32_t high) {
    const NarrowInts lows = NarrowInts{} + low, highs = NarrowInts{} + high;
    value = value > lows ? value : lows;
    return value < highs ? value : highs;
}

// Whether a comparison holds in any lane.
KVC_INLINE bool any(NarrowInts compared) {
    std::uint64_t parts[kNarrow / 2], found = 0;
    store(parts, compared);
    for (const std::uint64_t part : parts) found |= part;
    return found;
}

// Rounded to the nearest integers, ties to even. Magnitudes are less than 2**22.
KVC_INLINE NarrowInts nearest(NarrowFloats value) {
#if defined(__AVX2__)
    return as<NarrowInts>(_mm256_cvtps_epi32(value));
#else
    const NarrowFloats shift = narrow(0x1.8p23f);
    return __builtin_convertvector((value + shift) - shift, NarrowInts);
#endif
}

// Integers as bytes, of which those below 0 become 0, and those above 255 become 255.
KVC_INLINE void put_bytes(NarrowInts wide, u8* into) {
#if defined(__AVX2__)
    const __m256i all = as<__m256i>(wide);
    const __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(into), _mm_packus_epi16(words, words));
#else
    store(into, __builtin_convertvector(clamp(wide, 0, 255), NarrowBytes));
#endif
}

KVC_INLINE void put_bytes(NarrowInts first, NarrowInts second, u8* into) {
#if defined(__AVX2__)
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packus_epi32(as<__m256i>(first), as<__m256i>(second)), 0xD8);
    store(into, _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
#else
    put_bytes(first, into);
    put_bytes(second, into + kNarrow);
#endif
}

}  // namespace
}  // namespace kvc
