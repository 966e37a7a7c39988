// Decodes planes into rows of the caller. A run of 32 numbers is made of pairs of registers, those of even and those of odd
// places, as they lie in words of two codes. As in encode.hpp, every step is one of the definition.
#pragma once

#include "encode.hpp"

namespace kvc {
namespace {

constexpr std::size_t kPair = 2 * kLanes, kPairs = kRun / kPair;  // numbers of a pair, and pairs of a run

struct Codes {
    Bits even, odd;
};

struct Values {
    Floats even, odd;
};

// Pair `i` of the codes of a run: bytes.
KVC_INLINE Codes bytes_of(const u8* from, std::size_t i) {
    const Bits both = words(from + kPair * i);
    return {both & 0xFF, both >> 8};
}

// The same of 16 bytes: codes of the first half of a run in low nibbles, those of the second half in high ones.
KVC_INLINE Codes nibbles_of(const u8* from, std::size_t i) {
#if defined(__AVX512F__)
    const Bits shift = {0, 0, 0, 0, 0, 0, 0, 0, 4, 4, 4, 4, 4, 4, 4, 4};
    const __m256i twice = _mm256_broadcastsi128_si256(load<__m128i>(from));
    const Bits both = as<Bits>(_mm512_cvtepu16_epi32(twice)) >> shift;
    static_cast<void>(i);
#else
    constexpr std::size_t kHalf = kPairs / 2;  // pairs of half a run
    const Bits both = words(from + kPair * (i % kHalf)) >> static_cast<u32>(4 * (i / kHalf));
#endif
    return {both & 15, both >> 8 & 15};
}

KVC_INLINE Floats floats_of(Bits codes) { return __builtin_convertvector(as<Ints>(codes), Floats); }

template <typename N, bool kPast>
KVC_INLINE void put(const Values& values, u8* into) {
    Bits packed[N::kRegisters];
    N::pack(values.even, values.odd, packed);
    for (std::size_t i = 0; i < N::kRegisters; i++)
        kPast ? stream(into + i * sizeof(Bits), packed[i]) : store(into + i * sizeof(Bits), packed[i]);
}

// Copies the codes of `count` numbers, fewer than a run has, as bytes.
void spread(const u8* from, std::size_t count, bool nibbles, u8* codes) {
    if (count >= kRun) __builtin_unreachable();
    for (std::size_t i = 0; i < count; i++)
        codes[i] = !nibbles ? from[i] : i < count / 2 ? from[i] & 15 : from[i - count / 2] >> 4;
}

// Writes a row of numbers; `value(codes, at, i)` returns those of pair `i` of the run that begins at channel `at`.
template <typename N, bool kPast, bool kNibbles, typename Value>
KVC_INLINE void put_row(const u8* from, std::size_t dim, u8* into, const Value& value) {
    std::size_t at = 0;
    for (; at + kRun <= dim; at += kRun, from += kNibbles ? kRun / 2 : kRun) {
#pragma GCC unroll 4
        for (std::size_t i = 0; i < kPairs; i++) {
            const Codes codes = kNibbles ? nibbles_of(from, i) : bytes_of(from, i);
            put<N, kPast>(value(codes, at, i), into + (at + kPair * i) * N::kBytes);
        }
    }
    if (at == dim) return;
    u8 codes[kRun] = {}, rest[kRun * N::kBytes];
    spread(from, dim - at, kNibbles, codes);
    for (std::size_t i = 0; i < kPairs; i++) put<N, false>(value(bytes_of(codes, i), at, i), rest + kPair * i * N::kBytes);
    std::memcpy(into + at * N::kBytes, rest, (dim - at) * N::kBytes);
}

// Calls `row(number, head, into)` for each (token, head) that is wanted; its number is token * heads + head.
template <typename Row>
KVC_INLINE void each_row(const PlaneShape& plane, const PlaneRows& to, const Row& row) {
    const std::size_t bytes = plane.coded_bytes / plane.tokens;
    for (std::size_t token = 0; token < plane.tokens; token++) {
        u8* into = to.base + static_cast<std::ptrdiff_t>(token) * to.token_stride;
        for (std::size_t head = to.head_start; head < to.head_stop; head++, into += to.head_stride)
            row(token * plane.heads + head, head, into);
        if (to.ahead)
            for (std::size_t at = token * bytes; at < (token + 1) * bytes; at += 64) __builtin_prefetch(to.ahead + at);
    }
}

// ------------------------------------------------------------------------------------------------ q8: rows

template <typename N, bool kPast>
void decode_rows(const PlaneShape& plane, const u8* coded, const PlaneRows& to) {
    const std::size_t rows = plane.tokens * plane.heads;
    each_row(plane, to, [&](std::size_t row, std::size_t, u8* into) __attribute__((always_inline)) {
        const Floats scale = all(Bfloat16::get(coded + 2 * row)), low = all(Bfloat16::get(coded + 2 * (rows + row)));
        const u8* const from = coded + 4 * rows + row * plane.dim;
        const auto value = [&](Codes codes, std::size_t, std::size_t) __attribute__((always_inline)) -> Values {
            return {floats_of(codes.even) * scale + low, floats_of(codes.odd) * scale + low};
        };
        put_row<N, kPast, false>(from, plane.dim, into, value);
    });
}

// ------------------------------------------------------------------------------------------------ q4

KVC_INLINE Floats scales_of(Bits codes) { return as<Floats>((codes << 20) + ((127u - kScaleBias) << 23)); }

// Of bytes, as signed integers.
KVC_INLINE Floats zeros_of(Bits bytes) { return __builtin_convertvector(as<Ints>(bytes << 24) >> 24, Floats); }

// What holds for a pair of registers of channels: their scales, and these times their zero points.
struct Channels {
    Values scales, offsets;
};

// Of the wanted heads, kPairs for each run of channels, one head after the other.
void channels_of(const PlaneShape& plane, const u8* coded, const PlaneRows& to, u8* into) {
    for (std::size_t head = to.head_start; head < to.head_stop; head++) {
        for (std::size_t at = 0; at < plane.dim; at += kRun) {
            const u8 *scales = coded + head * plane.dim + at, *zeros = scales + plane.heads * plane.dim;
            u8 few_scales[kRun] = {}, few_zeros[kRun] = {};
            if (plane.dim - at < kRun) {
                spread(scales, plane.dim - at, false, few_scales);
                spread(zeros, plane.dim - at, false, few_zeros);
                scales = few_scales;
                zeros = few_zeros;
            }
            for (std::size_t i = 0; i < kPairs; i++, into += sizeof(Channels)) {
                const Codes scale = bytes_of(scales, i), zero = bytes_of(zeros, i);
                const Values made = {scales_of(scale.even), scales_of(scale.odd)};
                store(into, Channels{made, {made.even * zeros_of(zero.even), made.odd * zeros_of(zero.odd)}});
            }
        }
    }
}

template <typename N, bool kPast>
void decode_channels(const PlaneShape& plane, const u8* coded, const PlaneRows& to, float* scratch) {
    const std::size_t dim = plane.dim, head_bytes = (dim + kRun - 1) / kRun * kPairs * sizeof(Channels);
    u8* const channels = reinterpret_cast<u8*>(scratch);
    channels_of(plane, coded, to, channels);
    each_row(plane, to, [&](std::size_t row, std::size_t head, u8* into) __attribute__((always_inline)) {
        const u8* const of = channels + (head - to.head_start) * head_bytes;
        const u8* const from = coded + 2 * plane.heads * dim + row * dim / 2;
        const auto value = [&](Codes codes, std::size_t at, std::size_t i) __attribute__((always_inline)) -> Values {
            const u8* const pair = of + (at / kPair + i) * sizeof(Channels);
            constexpr std::size_t kSize = sizeof(Floats);
            return {floats_of(codes.even) * load<Floats>(pair) - load<Floats>(pair + 2 * kSize),
                    floats_of(codes.odd) * load<Floats>(pair + kSize) - load<Floats>(pair + 3 * kSize)};
        };
        put_row<N, kPast, true>(from, dim, into, value);
    });
}

template <typename N, bool kPast>
void decode_groups(const PlaneShape& plane, const u8* coded, const PlaneRows& to) {
    const std::size_t rows = plane.tokens * plane.heads, dim = plane.dim, groups = (dim + kRun - 1) / kRun;
    each_row(plane, to, [&](std::size_t row, std::size_t, u8* into) __attribute__((always_inline)) {
        const u8 *const scales = coded + row * groups, *const zeros = scales + rows * groups;
        const u8* const from = coded + 2 * rows * groups + row * dim / 2;
        const auto value = [&](Codes codes, std::size_t at, std::size_t) __attribute__((always_inline)) -> Values {
            const Floats scale = scales_of(Bits{} + scales[at / kRun]);
            const Floats offset = scale * zeros_of(Bits{} + zeros[at / kRun]);
            return {floats_of(codes.even) * scale - offset, floats_of(codes.odd) * scale - offset};
        };
        put_row<N, kPast, true>(from, dim, into, value);
    });
}

}  // namespace
}  // namespace kvc
