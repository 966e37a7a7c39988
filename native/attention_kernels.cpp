// The kernels of attention of one instruction set. Compiled once for each.
//
// Every number is made by the same steps whichever others are made beside it: a tile of queries and keys shares loads,
// never sums. So a result has the same bits in every batch, and with every number of lanes.
#include "attention_lanes.hpp"
#include "numbers.hpp"
#include "tables.hpp"

namespace kvc {
namespace {

constexpr std::size_t kParts = kSumLanes / kLanes;  // registers of a sum
constexpr std::size_t kTile = 4;                    // queries of a tile
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr std::size_t kColumns = 4;  // registers of channels of a tile: as many as this CPU has registers for
#else
constexpr std::size_t kColumns = 2;
#endif

// ------------------------------------------------------------------------------------------------------ widen

KVC_INLINE Floats wide(const u8* from, const Bfloat16&) { return as<Floats>(words(from) << 16); }
KVC_INLINE Floats wide(const u8* from, const Float32&) { return load<Floats>(from); }
KVC_INLINE Floats wide(const u8* from, const Float16&) {
    Floats result;
    for (std::size_t at = 0; at < kLanes; at += kNarrow) {
        const NarrowFloats some = Float16::narrow_of(from + 2 * at);
        std::memcpy(reinterpret_cast<u8*>(&result) + 4 * at, &some, sizeof some);
    }
    return result;
}

template <typename N>
void widen_rows(const u8* from, std::ptrdiff_t stride, std::size_t rows, std::size_t dim, std::ptrdiff_t ahead,
                FloatRows into) {
    const std::size_t whole = dim / kLanes * kLanes;
    for (std::size_t row = 0; row < rows; row++, from += stride) {
        float* const to = into.row(row);
        if (ahead)
            for (std::size_t at = 0; at < dim * N::kBytes; at += 64) __builtin_prefetch(from + ahead + at);
        for (std::size_t at = 0; at < whole; at += kLanes) store(to + at, wide(from + at * N::kBytes, N{}));
        if (whole == into.width) continue;
        u8 rest[kSumLanes * N::kBytes] = {};
        std::memcpy(rest, from + whole * N::kBytes, (dim - whole) * N::kBytes);
        for (std::size_t at = whole; at < into.width; at += kLanes) store(to + at, wide(rest + (at - whole) * N::kBytes, N{}));
    }
}

void widen(Number number, const u8* from, std::ptrdiff_t stride, std::size_t rows, std::size_t dim, std::ptrdiff_t ahead,
           FloatRows into) {
    if (number == Number::kBfloat16) return widen_rows<Bfloat16>(from, stride, rows, dim, ahead, into);
    if (number == Number::kFloat16) return widen_rows<Float16>(from, stride, rows, dim, ahead, into);
    widen_rows<Float32>(from, stride, rows, dim, ahead, into);
}

// ----------------------------------------------------------------------------------------------------- scores

// The products of kQueries queries and kLanes / kQueries keys: lane query * keys + key.
template <std::size_t kQueries>
KVC_INLINE Floats products(const float* query, const float* key, std::size_t width) {
    constexpr std::size_t kKeys = kLanes / kQueries;
    Floats sums[kParts][kLanes];
#pragma GCC unroll 4
    for (std::size_t part = 0; part < kParts; part++) {
        Floats sum[kLanes] = {};
        for (std::size_t at = part * kLanes; at < width; at += kSumLanes) {
            Floats keys[kKeys];
#pragma GCC unroll 16
            for (std::size_t j = 0; j < kKeys; j++) keys[j] = load<Floats>(key + j * width + at);
#pragma GCC unroll 4
            for (std::size_t i = 0; i < kQueries; i++) {
                const Floats q = load<Floats>(query + i * width + at);
#pragma GCC unroll 16
                for (std::size_t j = 0; j < kKeys; j++) sum[i * kKeys + j] = fma(q, keys[j], sum[i * kKeys + j]);
            }
        }
#pragma GCC unroll 16
        for (std::size_t i = 0; i < kLanes; i++) sums[part][i] = sum[i];
    }
#pragma GCC unroll 2
    for (std::size_t half = kParts / 2; half; half /= 2)
        for (std::size_t part = 0; part < half; part++)
#pragma GCC unroll 16
            for (std::size_t i = 0; i < kLanes; i++) sums[part][i] += sums[part + half][i];
    return sums_of_halves(sums[0]);
}

// As many scores of each query as there are keys left. Keys are read in whole tiles: their memory has room behind them.
template <std::size_t kQueries>
void score_tile(const float* query, FloatRows key, std::size_t keys, const ScoreShape& shape, float* into) {
    constexpr std::size_t kKeys = kLanes / kQueries;
    for (std::size_t at = 0; at < keys; at += kKeys) {
        Floats score = products<kQueries>(query, key.row(at), key.width) * shape.scale;
        if (shape.cap != 0) score = hyperbolic_tangent(score * shape.cap_reciprocal) * shape.cap;
        float made[kLanes];
        store(made, score);
        const std::size_t count = keys - at < kKeys ? keys - at : kKeys;
        for (std::size_t i = 0; i < kQueries; i++) {
            float* const to = into + i * kCutTokens + at;
            if (count == kKeys)
                std::memcpy(to, made + i * kKeys, kKeys * sizeof(float));
            else
                for (std::size_t j = 0; j < count; j++) to[j] = made[i * kKeys + j];
        }
    }
}

void scores(FloatRows query, std::size_t queries, FloatRows key, std::size_t keys, const ScoreShape& shape, float* into) {
    std::size_t at = 0;
    for (; at + kTile <= queries; at += kTile) score_tile<kTile>(query.row(at), key, keys, shape, into + at * kCutTokens);
    for (; at < queries; at++) score_tile<1>(query.row(at), key, keys, shape, into + at * kCutTokens);
}

// ---------------------------------------------------------------------------------------------------- weights

float weigh(float* scores, Seen seen, float* total) {
    const std::size_t first = seen.first / kSumLanes * kSumLanes;
    const std::size_t stop = (seen.stop + kSumLanes - 1) / kSumLanes * kSumLanes;
    for (std::size_t at = first; at < seen.first; at++) scores[at] = -__builtin_inff();
    for (std::size_t at = seen.stop; at < stop; at++) scores[at] = -__builtin_inff();
    Floats most = all(-__builtin_inff());
    for (std::size_t at = first; at < stop; at += kLanes) {
        const Floats score = load<Floats>(scores + at);
        most = most > score ? most : score;
    }
    float lanes[kSumLanes], highest = -__builtin_inff();
    store(lanes, most);
    for (std::size_t lane = 0; lane < kLanes; lane++) highest = highest > lanes[lane] ? highest : lanes[lane];
    const bool none = highest == -__builtin_inff();
    const Floats base = all(none ? 0 : highest);
    Floats sums[kParts] = {};
    for (std::size_t at = first; at < stop; at += kSumLanes)
        for (std::size_t part = 0; part < kParts; part++) {
            const Floats weight = exponential(load<Floats>(scores + at + part * kLanes) - base);
            store(scores + at + part * kLanes, weight);
            sums[part] += weight;
        }
    if (none) {
        *total = 1;
        return highest;
    }
    for (std::size_t part = 0; part < kParts; part++) store(lanes + part * kLanes, sums[part]);
    *total = sum_of_halves(lanes);
    return highest + logarithm(all(*total))[0];
}

// ----------------------------------------------------------------------------------------------------- values

template <std::size_t kRows, std::size_t kRegisters>
KVC_INLINE void add_columns(const float* weights, const float* value, std::size_t count, FloatRows out, float* to) {
    Floats sums[kRows][kRegisters];
#pragma GCC unroll 4
    for (std::size_t i = 0; i < kRows; i++)
#pragma GCC unroll 4
        for (std::size_t j = 0; j < kRegisters; j++) sums[i][j] = load<Floats>(to + i * out.width + j * kLanes);
    for (std::size_t at = 0; at < count; at++, value += out.width) {
        Floats values[kRegisters];
#pragma GCC unroll 4
        for (std::size_t j = 0; j < kRegisters; j++) values[j] = load<Floats>(value + j * kLanes);
#pragma GCC unroll 4
        for (std::size_t i = 0; i < kRows; i++) {
            const Floats weight = all(weights[i * kCutTokens + at]);
#pragma GCC unroll 4
            for (std::size_t j = 0; j < kRegisters; j++) sums[i][j] = fma(weight, values[j], sums[i][j]);
        }
    }
#pragma GCC unroll 4
    for (std::size_t i = 0; i < kRows; i++)
#pragma GCC unroll 4
        for (std::size_t j = 0; j < kRegisters; j++) store(to + i * out.width + j * kLanes, sums[i][j]);
}

// Adds the values of `count` positions, all of which these queries see.
template <std::size_t kRows>
void add_rows(const float* weights, const float* value, std::size_t count, FloatRows out, std::size_t row) {
    float* const to = out.row(row);
    std::size_t at = 0;
    for (; at + kColumns * kLanes <= out.width; at += kColumns * kLanes)
        add_columns<kRows, kColumns>(weights, value + at, count, out, to + at);
    for (; at < out.width; at += kLanes) add_columns<kRows, 1>(weights, value + at, count, out, to + at);
}

std::size_t clamp(std::size_t value, std::size_t low, std::size_t high) {
    return value < low ? low : value > high ? high : value;
}

void add_values(const float* weights, const Seen* seen, std::size_t queries, FloatRows value, std::size_t start,
                std::size_t count, FloatRows out) {
    const std::size_t stop = start + count;
    const auto add_one = [&](std::size_t query, std::size_t from, std::size_t to) {
        from = clamp(seen[query].first, from, to);
        to = clamp(seen[query].stop, from, to);
        if (from < to) add_rows<1>(weights + query * kCutTokens + from, value.row(from - start), to - from, out, query);
    };
    std::size_t at = 0;
    for (; at + kTile <= queries; at += kTile) {
        std::size_t from = start, to = stop;  // what all queries of the tile see
        for (std::size_t i = at; i < at + kTile; i++) {
            from = from < seen[i].first ? seen[i].first : from;
            to = to > seen[i].stop ? seen[i].stop : to;
        }
        from = clamp(from, start, stop);
        to = clamp(to, from, stop);
        for (std::size_t i = at; i < at + kTile; i++) add_one(i, start, from);
        if (from < to) add_rows<kTile>(weights + at * kCutTokens + from, value.row(from - start), to - from, out, at);
        for (std::size_t i = at; i < at + kTile; i++) add_one(i, to, stop);
    }
    for (; at < queries; at++) add_one(at, start, stop);
}

void divide(float* row, std::size_t width, float by) {
    const Floats total = all(by);
    for (std::size_t at = 0; at < width; at += kLanes) store(row + at, load<Floats>(row + at) / total);
}

// ------------------------------------------------------------------------------------------------------ merge

void merge_row(float* into, float* into_lse, const float* right, float right_lse, std::size_t width) {
    const bool first = *into_lse >= right_lse;
    const float most = first ? *into_lse : right_lse, least = first ? right_lse : *into_lse;
    if (least == -__builtin_inff()) {
        if (!first) std::memcpy(into, right, width * sizeof(float));
        *into_lse = most;
        return;
    }
    const Floats weight = exponential(all(least - most)), total = weight + 1.0f, share = 1.0f / total;
    const Floats far_share = weight * share;
    const float* const near = first ? into : right;
    const float* const far = first ? right : into;
    std::size_t at = 0;
    for (; at + kLanes <= width; at += kLanes)
        store(into + at, fma(load<Floats>(far + at), far_share, load<Floats>(near + at) * share));
    if (at < width) {
        float rest[3][kLanes] = {};
        std::memcpy(rest[0], near + at, (width - at) * sizeof(float));
        std::memcpy(rest[1], far + at, (width - at) * sizeof(float));
        store(rest[2], fma(load<Floats>(rest[1]), far_share, load<Floats>(rest[0]) * share));
        std::memcpy(into + at, rest[2], (width - at) * sizeof(float));
    }
    *into_lse = most + logarithm(total)[0];
}

void merge(float* into, float* into_lse, const float* right, const float* right_lse, std::size_t rows, std::size_t width) {
    for (std::size_t row = 0; row < rows; row++)
        merge_row(into + row * width, into_lse + row, right + row * width, right_lse[row], width);
}

}  // namespace

extern const AttentionKernels KVC_TABLE(attention);
const AttentionKernels KVC_TABLE(attention){widen, scores, weigh, add_values, divide, merge};

}  // namespace kvc
