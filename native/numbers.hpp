// How numbers of each dtype are read, kNarrow at a time, and written, 2 * kLanes at a time: a register of those with even
// places and one of those with odd places. All roundings are to nearest, ties to even.
//
// Numbers may lie at any address: a plane may begin behind an opaque one of seven bytes.
#pragma once

#include "lanes.hpp"

namespace kvc {
namespace {

// kBytes: of one number. kMost: the largest magnitude that is encoded, as bits: a quarter of the largest finite number,
// so that no rounding leaves the range. kRegisters: those that 2 * kLanes numbers fill.
struct Bfloat16 {
    static constexpr std::size_t kBytes = 2, kRegisters = 1;
    static constexpr u32 kMost = 0x7E7F;

    KVC_INLINE static NarrowFloats narrow_of(const u8* from) {
        return as<NarrowFloats>(narrow_words(from) << 16);
    }
    // In the upper halves. Integers, since instructions that convert to bfloat16 flush subnormal numbers.
    KVC_INLINE static Bits rounded(Floats value) {
        const Bits bits = as<Bits>(value);
        return bits + 0x7FFF + (bits >> 16 & 1);
    }
    KVC_INLINE static void pack(Floats even, Floats odd, Bits* out) {
        *out = rounded(even) >> 16 | (rounded(odd) & 0xFFFF0000);
    }
    static float get(const u8* from) { return as<float>(static_cast<u32>(load<u16>(from)) << 16); }
};

struct Float16 {
    static constexpr std::size_t kBytes = 2, kRegisters = 1;
    static constexpr u32 kMost = 0x73FF;

#if defined(__F16C__)
    KVC_INLINE static NarrowFloats narrow_of(const u8* from) { return as<NarrowFloats>(_mm256_cvtph_ps(load<__m128i>(from))); }
#else
    KVC_INLINE static NarrowFloats narrow_of(const u8* from) {
        const NarrowBits half = narrow_words(from);
        const NarrowBits bits = as<NarrowBits>(as<NarrowFloats>((half & 0x7FFF) << 13) * 0x1p112f);  // exact, subnormal or not
        const NarrowBits special = as<NarrowBits>((half & 0x7C00) == 0x7C00) & 0x7F800000;      // infinities and NaN
        return as<NarrowFloats>(bits | special | (half & 0x8000) << 16);
    }
#endif

    // In the lower halves.
    KVC_INLINE static Bits rounded(Floats value) {
#if defined(__AVX512F__)
        return as<Bits>(_mm512_cvtepu16_epi32(_mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)));
#elif defined(__F16C__)
        return as<Bits>(_mm256_cvtepu16_epi32(_mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)));
#else
        const Bits bits = as<Bits>(value), magnitude = bits & 0x7FFFFFFF;
        const Ints size = as<Ints>(magnitude);  // for comparisons, which are simpler of signed integers
        const Bits normal = (magnitude - (112u << 23) + 0xFFF + (magnitude >> 13 & 1)) >> 13;
        const Bits subnormal = as<Bits>(as<Floats>(magnitude) + 0.5f) - 0x3F000000;  // the sum rounds
        const Bits infinite = Bits{} + 0x7C00, nan = Bits{} + 0x7E00;
        const Bits finite = size < 0x38800000 ? subnormal : normal;
        const Bits half = size > 0x7F800000 ? nan : size >= 0x47800000 ? infinite : finite;
        return half | (bits >> 16 & 0x8000);
#endif
    }
    KVC_INLINE static void pack(Floats even, Floats odd, Bits* out) { *out = rounded(even) | rounded(odd) << 16; }
};

struct Float32 {
    static constexpr std::size_t kBytes = 4, kRegisters = 2;
    static constexpr u32 kMost = 0x7E7FFFFF;

    KVC_INLINE static NarrowFloats narrow_of(const u8* from) { return load<NarrowFloats>(from); }
    KVC_INLINE static void pack(Floats even, Floats odd, Bits* out) {
        float joined[2 * kLanes];
        for (std::size_t lane = 0; lane < kLanes; lane++) {
            joined[2 * lane] = even[lane];
            joined[2 * lane + 1] = odd[lane];
        }
        std::memcpy(out, joined, sizeof joined);
    }
};

}  // namespace
}  // namespace kvc
