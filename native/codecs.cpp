// q8 and q4, eight numbers at a time. Every step is one that IEEE 754 rounds in one way, and products are never fused with
// sums, so that the bytes are those of the definition in torch (kvcluster/pages/codec_torch.py), bit for bit.
#include "codecs.hpp"

#include <immintrin.h>

#include <cmath>
#include <cstring>

namespace kvc {
namespace {

using u8 = std::uint8_t;
using u16 = std::uint16_t;
using u32 = std::uint32_t;

constexpr std::size_t kRun = 32;       // channels that share their bytes: the first half low nibbles, the second high ones
constexpr float kTiny = 0x1p-120f;     // what is smaller is nothing: no reciprocal overflows, no result is subnormal
constexpr int kScaleBias = 20;         // of q4's scales: (8 + m) / 8 * 2 ** (e - 20)
constexpr int kLowest = -112;          // of q4's zero points; (code - zero) is within 127
constexpr int kHighest = 127;

u32 bits_of(float value) {
    u32 bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}

float float_of(u32 bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

// ------------------------------------------------------------------------------------------------- numbers

// How each kind of number is read and written, eight at a time or alone. `kMost`: the largest magnitude, as bits, that
// is encoded, a quarter of the largest finite number, so that no rounding leaves the range. `Raw` may lie at any address: a
// plane may begin behind an opaque one of seven bytes.

struct Bfloat16 {
    using Raw [[gnu::aligned(1), gnu::may_alias]] = u16;
    static constexpr u32 kMost = 0x7E7F;

    static __m256 load(const u16* from) {
        const __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(raw), 16));
    }
    static __m256i rounded(__m256 value) {  // to nearest, ties to even, in the low halves
        const __m256i bits = _mm256_castps_si256(value);
        const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
        const __m256i up = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF));
        return _mm256_srli_epi32(_mm256_add_epi32(bits, up), 16);
    }
    static void store(u16* into, __m256 value) {
        const __m256i halves = rounded(value);
        const __m128i packed = _mm_packus_epi32(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(into), packed);
    }
    static void store(u16* into, __m256 low, __m256 high) {
        const __m256i packed = _mm256_packus_epi32(rounded(low), rounded(high));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(into), _mm256_permute4x64_epi64(packed, 0xD8));
    }
    static float get(u16 raw) { return float_of(static_cast<u32>(raw) << 16); }
    static u16 put(float value) {
        const u32 bits = bits_of(value);
        return static_cast<u16>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
    }
};

struct Float16 {
    using Raw [[gnu::aligned(1), gnu::may_alias]] = u16;
    static constexpr u32 kMost = 0x73FF;

    static __m256 load(const u16* from) {
        return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    }
    static void store(u16* into, __m256 value) {
        const __m128i packed = _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(into), packed);
    }
    static void store(u16* into, __m256 low, __m256 high) {
        store(into, low);
        store(into + 8, high);
    }
    static float get(u16 raw) { return _cvtsh_ss(raw); }
    static u16 put(float value) { return static_cast<u16>(_cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT)); }
};

struct Float32 {
    using Raw [[gnu::aligned(1), gnu::may_alias]] = float;
    static constexpr u32 kMost = 0x7E7FFFFF;

    static __m256 load(const float* from) { return _mm256_loadu_ps(from); }
    static void store(float* into, __m256 value) { _mm256_storeu_ps(into, value); }
    static void store(float* into, __m256 low, __m256 high) {
        store(into, low);
        store(into + 8, high);
    }
    static float get(float raw) { return raw; }
    static float put(float value) { return value; }
};

// Is every number of a plane, which are a multiple of eight, finite and not too large?
bool encodable(const u16* from, std::size_t count, u32 most) {
    const __m128i magnitude = _mm_set1_epi16(0x7FFF);
    __m128i largest = _mm_setzero_si128();
    for (std::size_t at = 0; at < count; at += 8) {
        const __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + at));
        largest = _mm_max_epu16(largest, _mm_and_si128(raw, magnitude));
    }
    alignas(16) u16 lanes[8];
    _mm_store_si128(reinterpret_cast<__m128i*>(lanes), largest);
    for (const u16 lane : lanes)
        if (lane > most) return false;
    return true;
}

bool encodable(const float* from, std::size_t count, u32 most) {
    const __m256i magnitude = _mm256_set1_epi32(0x7FFFFFFF);
    __m256i largest = _mm256_setzero_si256();
    for (std::size_t at = 0; at < count; at += 8)
        largest = _mm256_max_epu32(largest, _mm256_and_si256(_mm256_castps_si256(_mm256_loadu_ps(from + at)), magnitude));
    alignas(32) u32 lanes[8];
    _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), largest);
    for (const u32 lane : lanes)
        if (lane > most) return false;
    return true;
}

float least(__m256 value) {
    __m128 half = _mm_min_ps(_mm256_castps256_ps128(value), _mm256_extractf128_ps(value, 1));
    half = _mm_min_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_min_ss(half, _mm_shuffle_ps(half, half, 1)));
}

float most(__m256 value) {
    __m128 half = _mm_max_ps(_mm256_castps256_ps128(value), _mm256_extractf128_ps(value, 1));
    half = _mm_max_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_max_ss(half, _mm_shuffle_ps(half, half, 1)));
}

struct Range {
    float low, high;
};

template <typename N>
Range range_of(const typename N::Raw* from, std::size_t count) {
    __m256 low = N::load(from), high = low;
    for (std::size_t at = 8; at < count; at += 8) {
        const __m256 x = N::load(from + at);
        low = _mm256_min_ps(low, x);
        high = _mm256_max_ps(high, x);
    }
    return {least(low), most(high)};
}

// ------------------------------------------------------------------------------------------------ q8: rows

// The upper half of a number's bits, rounded towards minus infinity; zero where it is tiny, and never minus zero.
u16 bfloat16_below(float value) {
    if (std::fabs(value) < kTiny) return 0;
    const u32 bits = bits_of(value);
    return static_cast<u16>((bits >> 16) + ((bits >> 31) && (bits & 0xFFFF)));
}

// Of a number that is not negative: rounded up; zero where it is tiny.
u16 bfloat16_above(float value) {
    if (value < kTiny) return 0;
    const u32 bits = bits_of(value);
    return static_cast<u16>((bits >> 16) + ((bits & 0xFFFF) != 0));
}

// Eight integers as bytes, of which those below 0 become 0, and those above 255 become 255.
void put_bytes(__m256i wide, u8* into) {
    const __m256i words = _mm256_packus_epi32(wide, wide);
    const __m256i bytes = _mm256_packus_epi16(words, words);
    const __m256i joined = _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 0, 0, 0, 0, 0, 0));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(into), _mm256_castsi256_si128(joined));
}

template <typename N>
void encode_rows(const typename N::Raw* from, std::size_t rows, std::size_t dim, u8* into) {
    u16* const scales = reinterpret_cast<u16*>(into);
    u16* const minima = scales + rows;
    u8* codes = into + 4 * rows;
    for (std::size_t row = 0; row < rows; row++, from += dim, codes += dim) {
        const Range range = range_of<N>(from, dim);
        const u16 minimum = bfloat16_below(range.low);
        const float low = Bfloat16::get(minimum);
        const u16 scale = bfloat16_above((range.high - low) / 255.0f);
        const float reciprocal = scale ? 1.0f / Bfloat16::get(scale) : 0.0f;
        std::memcpy(scales + row, &scale, 2);
        std::memcpy(minima + row, &minimum, 2);
        const __m256 lows = _mm256_set1_ps(low), reciprocals = _mm256_set1_ps(reciprocal);
        for (std::size_t at = 0; at < dim; at += 8) {
            const __m256 steps = _mm256_mul_ps(_mm256_sub_ps(N::load(from + at), lows), reciprocals);
            put_bytes(_mm256_cvtps_epi32(steps), codes + at);
        }
    }
}

__m256 eight(const u8* codes) {
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes))));
}

template <typename N>
void decode_rows(const u8* coded, std::size_t rows, std::size_t dim, typename N::Raw* into) {
    const u8* const scales = coded;
    const u8* const minima = coded + 2 * rows;
    const u8* codes = coded + 4 * rows;
    for (std::size_t row = 0; row < rows; row++, codes += dim, into += dim) {
        u16 scale, minimum;
        std::memcpy(&scale, scales + 2 * row, 2);
        std::memcpy(&minimum, minima + 2 * row, 2);
        const __m256 steps = _mm256_set1_ps(Bfloat16::get(scale)), low = _mm256_set1_ps(Bfloat16::get(minimum));
        const auto value = [&](const u8* at) { return _mm256_add_ps(_mm256_mul_ps(eight(at), steps), low); };
        std::size_t at = 0;
        for (; at + 16 <= dim; at += 16) N::store(into + at, value(codes + at), value(codes + at + 8));
        if (at < dim) N::store(into + at, value(codes + at));
    }
}

// ------------------------------------------------------------------------------------------- q4: scale and zero

float scale_of(u8 code) { return float_of((static_cast<u32>(code) << 20) + ((127u - kScaleBias) << 23)); }

// What numbers are multiplied with, and what is added then, to become codes.
struct Steps {
    __m256 reciprocals, zeros;
};

// How each of eight ranges is cut into fifteen steps of which zero is one, or the end of one; their scales and zero points.
// False where a scale would be too large.
bool steps_of(__m256 low, __m256 high, u8* scales, u8* zeros, Steps* steps) {
    const __m256 minus_low = _mm256_xor_ps(low, _mm256_set1_ps(-0.0f));
    const __m256 span = _mm256_div_ps(_mm256_sub_ps(high, low), _mm256_set1_ps(15.0f));
    const __m256 far = _mm256_div_ps(_mm256_max_ps(high, minus_low), _mm256_set1_ps(127.0f));
    const __m256i bits = _mm256_castps_si256(_mm256_add_ps(_mm256_max_ps(span, far), _mm256_setzero_ps()));
    const __m256i up = _mm256_add_epi32(bits, _mm256_set1_epi32(0xFFFFF));
    const __m256i found = _mm256_sub_epi32(_mm256_srli_epi32(up, 20), _mm256_set1_epi32((127 - kScaleBias) << 3));
    if (_mm256_movemask_epi8(_mm256_cmpgt_epi32(found, _mm256_set1_epi32(255)))) return false;
    const __m256i codes = _mm256_max_epi32(found, _mm256_setzero_si256());
    const __m256i shifted = _mm256_add_epi32(_mm256_slli_epi32(codes, 20), _mm256_set1_epi32((127 - kScaleBias) << 23));
    const __m256 scale = _mm256_castsi256_ps(shifted);
    constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    const __m256 zero = _mm256_round_ps(_mm256_div_ps(minus_low, scale), kNearest);
    steps->zeros = _mm256_min_ps(_mm256_max_ps(zero, _mm256_set1_ps(kLowest)), _mm256_set1_ps(kHighest));
    steps->reciprocals = _mm256_div_ps(_mm256_set1_ps(1.0f), scale);
    put_bytes(codes, scales);
    put_bytes(_mm256_and_si256(_mm256_cvtps_epi32(steps->zeros), _mm256_set1_epi32(0xFF)), zeros);
    return true;
}

int code_of(float value, float reciprocal, float zero) {
    const int code = static_cast<int>(std::nearbyint(value * reciprocal + zero));
    return code < 0 ? 0 : code > 15 ? 15 : code;
}

// `count` channels of one token, each with a reciprocal scale and a zero point of its own, into count / 2 bytes.
template <typename N>
void pack(const typename N::Raw* from, const float* reciprocals, const float* zeros, std::size_t count, u8* into) {
    std::size_t at = 0;
    const auto codes = [&](std::size_t channel) {
        const __m256 steps = _mm256_mul_ps(N::load(from + channel), _mm256_loadu_ps(reciprocals + channel));
        const __m256i wide = _mm256_cvtps_epi32(_mm256_add_ps(steps, _mm256_loadu_ps(zeros + channel)));
        return _mm256_min_epi32(_mm256_max_epi32(wide, _mm256_setzero_si256()), _mm256_set1_epi32(15));
    };
    for (; at + kRun <= count; at += kRun, into += kRun / 2) {
        const __m256i first = _mm256_or_si256(codes(at), _mm256_slli_epi32(codes(at + 16), 4));
        const __m256i second = _mm256_or_si256(codes(at + 8), _mm256_slli_epi32(codes(at + 24), 4));
        const __m256i words = _mm256_permute4x64_epi64(_mm256_packus_epi32(first, second), 0xD8);
        const __m128i bytes = _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(into), bytes);
    }
    const std::size_t half = (count - at) / 2;
    for (std::size_t i = 0; i < half; i++) {
        const auto code = [&](std::size_t channel) {
            return code_of(N::get(from[channel]), reciprocals[channel], zeros[channel]);
        };
        into[i] = static_cast<u8>(code(at + i) | code(at + half + i) << 4);
    }
}

// The inverse; `offsets` are scale * zero of each channel.
template <typename N>
void unpack(const u8* coded, const float* scales, const float* offsets, std::size_t count, typename N::Raw* into) {
    const __m128i low = _mm_set1_epi8(15);
    std::size_t at = 0;
    const auto value = [&](__m128i codes, std::size_t channel) {
        const __m256 steps = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(codes));
        const __m256 product = _mm256_mul_ps(steps, _mm256_loadu_ps(scales + channel));
        return _mm256_sub_ps(product, _mm256_loadu_ps(offsets + channel));
    };
    for (; at + kRun <= count; at += kRun, coded += kRun / 2) {
        const __m128i both = _mm_loadu_si128(reinterpret_cast<const __m128i*>(coded));
        const __m128i first = _mm_and_si128(both, low), second = _mm_and_si128(_mm_srli_epi16(both, 4), low);
        N::store(into + at, value(first, at), value(_mm_srli_si128(first, 8), at + 8));
        N::store(into + at + 16, value(second, at + 16), value(_mm_srli_si128(second, 8), at + 24));
    }
    const std::size_t half = (count - at) / 2;
    for (std::size_t i = 0; i < half; i++) {
        const std::size_t here = at + i, there = at + half + i;
        into[here] = N::put(static_cast<float>(coded[i] & 15) * scales[here] - offsets[here]);
        into[there] = N::put(static_cast<float>(coded[i] >> 4) * scales[there] - offsets[there]);
    }
}

// ---------------------------------------------------------------------------------------------- q4: channels

// Bytes: scales u8 [heads, dim], zeros i8 [heads, dim], codes [tokens, heads, dim / 2].
template <typename N>
bool encode_channels(const typename N::Raw* from, std::size_t tokens, std::size_t heads, std::size_t dim, u8* into,
                     float* scratch) {
    const std::size_t channels = heads * dim;
    float *const reciprocals = scratch, *const zeros = scratch + channels;
    for (std::size_t at = 0; at < channels; at += 8) {
        __m256 low = N::load(from + at), high = low;
        for (std::size_t token = 1; token < tokens; token++) {
            const __m256 x = N::load(from + token * channels + at);
            low = _mm256_min_ps(low, x);
            high = _mm256_max_ps(high, x);
        }
        Steps steps;
        if (!steps_of(low, high, into + at, into + channels + at, &steps)) return false;
        _mm256_storeu_ps(reciprocals + at, steps.reciprocals);
        _mm256_storeu_ps(zeros + at, steps.zeros);
    }
    u8* codes = into + 2 * channels;
    for (std::size_t token = 0; token < tokens; token++)
        for (std::size_t head = 0; head < heads; head++, codes += dim / 2, from += dim)
            pack<N>(from, reciprocals + head * dim, zeros + head * dim, dim, codes);
    return true;
}

template <typename N>
void decode_channels(const u8* coded, std::size_t tokens, std::size_t heads, std::size_t dim,
                     typename N::Raw* into, float* scratch) {
    const std::size_t channels = heads * dim;
    float *const scales = scratch, *const offsets = scratch + channels;
    for (std::size_t channel = 0; channel < channels; channel++) {
        scales[channel] = scale_of(coded[channel]);
        offsets[channel] = scales[channel] * static_cast<std::int8_t>(coded[channels + channel]);
    }
    const u8* codes = coded + 2 * channels;
    for (std::size_t token = 0; token < tokens; token++)
        for (std::size_t head = 0; head < heads; head++, codes += dim / 2, into += dim)
            unpack<N>(codes, scales + head * dim, offsets + head * dim, dim, into);
}

// ------------------------------------------------------------------------------------------------ q4: groups

// What holds for all channels of a run.
void fill_run(float* into, __m256 value) {
    for (std::size_t at = 0; at < kRun; at += 8) _mm256_storeu_ps(into + at, value);
}

// Bytes: scales u8 [tokens, heads, groups], zeros i8 [tokens, heads, groups], codes [tokens, heads, dim / 2].
template <typename N>
bool encode_groups(const typename N::Raw* from, std::size_t rows, std::size_t dim, u8* into) {
    const std::size_t groups = (dim + kRun - 1) / kRun;
    u8 *scales = into, *zeros = into + rows * groups, *codes = into + 2 * rows * groups;
    float reciprocals[kRun], offsets[kRun];
    for (std::size_t row = 0; row < rows; row++) {
        for (std::size_t left = dim; left;) {
            const std::size_t count = left < kRun ? left : kRun;
            const Range range = range_of<N>(from, count);
            Steps steps;
            u8 scale[8], zero[8];  // eight times the same
            if (!steps_of(_mm256_set1_ps(range.low), _mm256_set1_ps(range.high), scale, zero, &steps)) return false;
            *scales++ = *scale;
            *zeros++ = *zero;
            fill_run(reciprocals, steps.reciprocals);
            fill_run(offsets, steps.zeros);
            pack<N>(from, reciprocals, offsets, count, codes);
            from += count;
            codes += count / 2;
            left -= count;
        }
    }
    return true;
}

template <typename N>
void decode_groups(const u8* coded, std::size_t rows, std::size_t dim, typename N::Raw* into) {
    const std::size_t groups = (dim + kRun - 1) / kRun;
    const u8 *scales = coded, *zeros = coded + rows * groups, *codes = coded + 2 * rows * groups;
    float steps[kRun], offsets[kRun];
    for (std::size_t row = 0; row < rows; row++) {
        for (std::size_t left = dim; left;) {
            const std::size_t count = left < kRun ? left : kRun;
            const float scale = scale_of(*scales++);
            fill_run(steps, _mm256_set1_ps(scale));
            fill_run(offsets, _mm256_set1_ps(scale * static_cast<std::int8_t>(*zeros++)));
            unpack<N>(codes, steps, offsets, count, into);
            into += count;
            codes += count / 2;
            left -= count;
        }
    }
}

// ----------------------------------------------------------------------------------------------------- planes

template <typename N>
bool encode_plane(const LayerShape& layer, const PlaneShape& plane, const u8* raw, u8* into, float* scratch) {
    const typename N::Raw* from = reinterpret_cast<const typename N::Raw*>(raw);
    const std::size_t rows = layer.tokens * layer.heads;
    if (!encodable(from, rows * plane.dim, N::kMost)) return false;
    if (plane.coding == Coding::kChannels)
        return encode_channels<N>(from, layer.tokens, layer.heads, plane.dim, into, scratch);
    if (plane.coding == Coding::kGroups) return encode_groups<N>(from, rows, plane.dim, into);
    encode_rows<N>(from, rows, plane.dim, into);
    return true;
}

template <typename N>
void decode_plane(const LayerShape& layer, const PlaneShape& plane, const u8* coded, u8* into, float* scratch) {
    typename N::Raw* to = reinterpret_cast<typename N::Raw*>(into);
    const std::size_t rows = layer.tokens * layer.heads;
    if (plane.coding == Coding::kChannels)
        decode_channels<N>(coded, layer.tokens, layer.heads, plane.dim, to, scratch);
    else if (plane.coding == Coding::kGroups)
        decode_groups<N>(coded, rows, plane.dim, to);
    else
        decode_rows<N>(coded, rows, plane.dim, to);
}

template <typename N>
void add_squares_of(const u8* raw, const u8* decoded, std::size_t nbytes, Squares* sums) {
    const typename N::Raw* before = reinterpret_cast<const typename N::Raw*>(raw);
    const typename N::Raw* after = reinterpret_cast<const typename N::Raw*>(decoded);
    for (std::size_t at = 0; at < nbytes / sizeof(*before); at++) {
        const double x = N::get(before[at]), lost = N::get(after[at]) - x;
        sums->lost += lost * lost;
        sums->whole += x * x;
    }
}

}  // namespace

bool encode_layer(const LayerShape& layer, const u8* raw, u8* into, float* scratch) {
    for (const PlaneShape& plane : layer.planes) {
        bool coded = true;
        if (plane.coding == Coding::kRaw) std::memcpy(into, raw, plane.raw_bytes);
        else if (plane.number == Number::kBfloat16) coded = encode_plane<Bfloat16>(layer, plane, raw, into, scratch);
        else if (plane.number == Number::kFloat16) coded = encode_plane<Float16>(layer, plane, raw, into, scratch);
        else coded = encode_plane<Float32>(layer, plane, raw, into, scratch);
        if (!coded) return false;
        raw += plane.raw_bytes;
        into += plane.coded_bytes;
    }
    return true;
}

void decode_layer(const LayerShape& layer, const u8* coded, u8* into, float* scratch) {
    for (const PlaneShape& plane : layer.planes) {
        if (plane.coding == Coding::kRaw) std::memcpy(into, coded, plane.raw_bytes);
        else if (plane.number == Number::kBfloat16) decode_plane<Bfloat16>(layer, plane, coded, into, scratch);
        else if (plane.number == Number::kFloat16) decode_plane<Float16>(layer, plane, coded, into, scratch);
        else decode_plane<Float32>(layer, plane, coded, into, scratch);
        coded += plane.coded_bytes;
        into += plane.raw_bytes;
    }
}

void add_squares(const LayerShape& layer, const u8* raw, const u8* decoded, Squares* planes) {
    for (const PlaneShape& plane : layer.planes) {
        if (plane.coding == Coding::kRaw) {
        } else if (plane.number == Number::kBfloat16) {
            add_squares_of<Bfloat16>(raw, decoded, plane.raw_bytes, planes);
        } else if (plane.number == Number::kFloat16) {
            add_squares_of<Float16>(raw, decoded, plane.raw_bytes, planes);
        } else {
            add_squares_of<Float32>(raw, decoded, plane.raw_bytes, planes);
        }
        raw += plane.raw_bytes;
        decoded += plane.raw_bytes;
        planes++;
    }
}

}  // namespace kvc
