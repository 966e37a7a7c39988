// Encodes planes, kNarrow numbers at a time. Every step is one that IEEE 754 rounds in one way, and products are never fused
// with sums, so that the bytes are those of the definition in torch (kvcluster/pages/codec_torch.py), bit for bit.
#pragma once

#include <cmath>
#include <type_traits>

#include "numbers.hpp"
#include "planes.hpp"

namespace kvc {
namespace {

constexpr std::size_t kRun = 32;    // channels that share bytes: the first half low nibbles, the second high ones
constexpr float kTiny = 0x1p-120f;  // what is smaller is zero: no reciprocal overflows, no result is subnormal
constexpr int kScaleBias = 20;      // of q4's scales: (8 + m) / 8 * 2 ** (e - 20)
constexpr int kLowest = -112;       // of q4's zero points; (code - zero) is within 127
constexpr int kHighest = 127;

// Whether all of `count` numbers, a multiple of eight, are finite and not too large.
template <typename N>
bool encodable(const u8* from, std::size_t count) {
    using Raw = std::conditional_t<N::kBytes == 4, std::int32_t, std::int16_t>;  // signed: compared in one instruction
    constexpr Raw kMagnitude = static_cast<Raw>(~(Raw{1} << (8 * sizeof(Raw) - 1)));
    Raw largest = 0;
    for (std::size_t at = 0; at < count; at++) {
        const Raw raw = load<Raw>(from + at * sizeof(Raw)) & kMagnitude;
        largest = largest < raw ? raw : largest;
    }
    return static_cast<u32>(largest) <= N::kMost;
}

struct Range {
    float low, high;
};

template <typename N>
KVC_INLINE Range range_of(const u8* from, std::size_t count) {
    NarrowFloats low = N::narrow_of(from), high = low;
    for (std::size_t at = kNarrow; at < count; at += kNarrow) {
        const NarrowFloats x = N::narrow_of(from + at * N::kBytes);
        low = least(low, x);
        high = most(high, x);
    }
    float lows[kNarrow], highs[kNarrow];
    store(lows, low);
    store(highs, high);
#pragma GCC unroll 3
    for (std::size_t half = kNarrow / 2; half; half /= 2) {
#pragma GCC unroll 4
        for (std::size_t lane = 0; lane < half; lane++) {
            lows[lane] = lows[lane] < lows[lane + half] ? lows[lane] : lows[lane + half];
            highs[lane] = highs[lane] > highs[lane + half] ? highs[lane] : highs[lane + half];
        }
    }
    return {lows[0], highs[0]};
}

// ------------------------------------------------------------------------------------------------ q8: rows

// The upper half of a number's bits, rounded towards minus infinity; zero where it is tiny, and never minus zero.
u16 bfloat16_below(float value) {
    if (std::fabs(value) < kTiny) return 0;
    const u32 bits = as<u32>(value);
    return static_cast<u16>((bits >> 16) + ((bits >> 31) && (bits & 0xFFFF)));
}

// Of a number that is not negative: rounded up; zero where it is tiny.
u16 bfloat16_above(float value) {
    if (value < kTiny) return 0;
    const u32 bits = as<u32>(value);
    return static_cast<u16>((bits >> 16) + ((bits & 0xFFFF) != 0));
}

template <typename N>
void encode_rows(const PlaneShape& plane, const u8* from, u8* into) {
    const std::size_t rows = plane.tokens * plane.heads, dim = plane.dim;
    u8 *const scales = into, *const minima = into + 2 * rows;
    u8* codes = into + 4 * rows;
    for (std::size_t row = 0; row < rows; row++, codes += dim, from += dim * N::kBytes) {
        const Range range = range_of<N>(from, dim);
        store(minima + 2 * row, bfloat16_below(range.low));
        const float low = Bfloat16::get(minima + 2 * row);
        store(scales + 2 * row, bfloat16_above((range.high - low) / 255.0f));
        const float scale = Bfloat16::get(scales + 2 * row), reciprocal = scale == 0 ? 0.0f : 1.0f / scale;
        const NarrowFloats lows = narrow(low), reciprocals = narrow(reciprocal);
        for (std::size_t at = 0; at < dim; at += kNarrow) {
            const NarrowFloats steps = (N::narrow_of(from + at * N::kBytes) - lows) * reciprocals;
            put_bytes(nearest(steps), codes + at);
        }
    }
}

// ------------------------------------------------------------------------------------------- q4: scale and zero

// What numbers are multiplied with, and what is added then, to become codes.
struct Steps {
    NarrowFloats reciprocals, zeros;
};

// How each of kNarrow ranges is cut into fifteen steps of which zero is one, or the end of one; their scales and zero points.
// False where a scale would be too large.
KVC_INLINE bool steps_of(NarrowFloats low, NarrowFloats high, u8* scales, u8* zeros, Steps* steps) {
    const NarrowFloats minus_low = -low;
    const NarrowFloats span = (high - low) / narrow(15.0f), far = most(high, minus_low) / narrow(127.0f);
    const NarrowInts bits = as<NarrowInts>(most(span, far) + 0.0f);
    const NarrowInts found = ((bits + 0xFFFFF) >> 20) - ((127 - kScaleBias) << 3);
    const NarrowInts codes = clamp(found, 0, 255);
    if (any(found > codes)) return false;
    const NarrowFloats scale = as<NarrowFloats>((codes << 20) + ((127 - kScaleBias) << 23));
    const NarrowInts zero = clamp(nearest(minus_low / scale), kLowest, kHighest);
    steps->zeros = __builtin_convertvector(zero, NarrowFloats);
    steps->reciprocals = narrow(1.0f) / scale;
    put_bytes(codes, scales);
    put_bytes(zero & 0xFF, zeros);
    return true;
}

// `count` channels of one token, each with a reciprocal scale and a zero point of its own, into count / 2 bytes.
template <typename N>
void pack(const u8* from, const float* reciprocals, const float* zeros, std::size_t count, u8* into) {
    const auto codes = [&](std::size_t channel) __attribute__((always_inline)) {
        const NarrowFloats steps = N::narrow_of(from + channel * N::kBytes) * load<NarrowFloats>(reciprocals + channel);
        return clamp(nearest(steps + load<NarrowFloats>(zeros + channel)), 0, 15);
    };
    std::size_t at = 0;
    for (; at + kRun <= count; at += kRun, into += kRun / 2) {
        const auto both = [&](std::size_t i) __attribute__((always_inline)) {
            return codes(at + i) | codes(at + kRun / 2 + i) << 4;
        };
        for (std::size_t i = 0; i < kRun / 2; i += 2 * kNarrow) put_bytes(both(i), both(i + kNarrow), into + i);
    }
    u8 rest[kRun];
    for (std::size_t i = at; i < count; i += kNarrow) put_bytes(codes(i), rest + i - at);
    const std::size_t half = (count - at) / 2;
    for (std::size_t i = 0; i < half; i++) into[i] = static_cast<u8>(rest[i] | rest[half + i] << 4);
}

// ---------------------------------------------------------------------------------------------- q4: channels

// Bytes: scales u8 [heads, dim], zeros i8 [heads, dim], codes [tokens, heads, dim / 2].
template <typename N>
bool encode_channels(const PlaneShape& plane, const u8* from, u8* into, float* scratch) {
    const std::size_t dim = plane.dim, channels = plane.heads * dim;
    float *const reciprocals = scratch, *const zeros = scratch + channels;
    for (std::size_t at = 0; at < channels; at += kNarrow) {
        NarrowFloats low = N::narrow_of(from + at * N::kBytes), high = low;
        for (std::size_t token = 1; token < plane.tokens; token++) {
            const NarrowFloats x = N::narrow_of(from + (token * channels + at) * N::kBytes);
            low = least(low, x);
            high = most(high, x);
        }
        Steps steps;
        if (!steps_of(low, high, into + at, into + channels + at, &steps)) return false;
        store(reciprocals + at, steps.reciprocals);
        store(zeros + at, steps.zeros);
    }
    u8* codes = into + 2 * channels;
    for (std::size_t token = 0; token < plane.tokens; token++)
        for (std::size_t head = 0; head < plane.heads; head++, codes += dim / 2, from += dim * N::kBytes)
            pack<N>(from, reciprocals + head * dim, zeros + head * dim, dim, codes);
    return true;
}

// ------------------------------------------------------------------------------------------------ q4: groups

// Bytes: scales u8 [tokens, heads, groups], zeros i8 [tokens, heads, groups], codes [tokens, heads, dim / 2].
template <typename N>
bool encode_groups(const PlaneShape& plane, const u8* from, u8* into) {
    const std::size_t rows = plane.tokens * plane.heads, groups = (plane.dim + kRun - 1) / kRun;
    u8 *scales = into, *zeros = into + rows * groups, *codes = into + 2 * rows * groups;
    NarrowFloats reciprocals[kRun / kNarrow], offsets[kRun / kNarrow];  // what holds for all channels of a run
    for (std::size_t row = 0; row < rows; row++) {
        for (std::size_t left = plane.dim; left;) {
            const std::size_t count = left < kRun ? left : kRun;
            const Range range = range_of<N>(from, count);
            Steps steps;
            u8 scale[kNarrow], zero[kNarrow];  // of each lane the same
            if (!steps_of(narrow(range.low), narrow(range.high), scale, zero, &steps)) return false;
            *scales++ = *scale;
            *zeros++ = *zero;
            for (NarrowFloats& each : reciprocals) each = steps.reciprocals;
            for (NarrowFloats& each : offsets) each = steps.zeros;
            pack<N>(from, reinterpret_cast<const float*>(reciprocals), reinterpret_cast<const float*>(offsets), count, codes);
            from += count * N::kBytes;
            codes += count / 2;
            left -= count;
        }
    }
    return true;
}

}  // namespace
}  // namespace kvc
