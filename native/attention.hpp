// Attention over pages: one call, and the kernels of one instruction set that carry it out. The steps of the arithmetic are
// those of kvcluster/attention/torch_kernel.py, which is the definition.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "codecs.hpp"

namespace kvc {

struct Kernels;

constexpr std::size_t kCutTokens = 512;  // positions of a leaf of the tree (kvcluster/core/position_tree.py)
constexpr std::size_t kSumLanes = 16;    // lanes of a sum, and what rows of floats are padded to a multiple of

// Rows of `width` floats, a multiple of kSumLanes, one after the other.
struct FloatRows {
    float* base;
    std::size_t width;
    float* row(std::size_t at) const { return base + at * width; }
};

// How a product of query and key becomes a score. `cap` is 0 where there is none.
struct ScoreShape {
    float scale;
    float cap;
    float cap_reciprocal;
};

// The positions of a cut that a query sees.
struct Seen {
    std::uint32_t first;
    std::uint32_t stop;
};

// Scores and weights of one query lie in rows of kCutTokens floats, by position within the cut. No function allocates.
struct AttentionKernels {
    // Numbers of 16 or 32 bits to floats; the rows' padding becomes 0. What lies `ahead` bytes behind is prefetched, unless
    // that is 0.
    void (*widen)(Number number, const std::uint8_t* from, std::ptrdiff_t stride, std::size_t rows, std::size_t dim,
                  std::ptrdiff_t ahead, FloatRows into);
    // The scores of `queries` queries for `keys` keys; to into[query * kCutTokens + key].
    void (*scores)(FloatRows query, std::size_t queries, FloatRows key, std::size_t keys, const ScoreShape& shape,
                   float* into);
    // Scores to weights, for the positions `seen`, of which there is one; those that are not there are -inf. Returns the
    // logarithm of the sum of exponentials, and the weights' sum by `total`; -inf and 1 where there is no finite score.
    float (*weigh)(float* scores, Seen seen, float* total);
    // Adds weight * value for the positions `start` to `start + count` that each query sees.
    void (*add_values)(const float* weights, const Seen* seen, std::size_t queries, FloatRows value, std::size_t start,
                       std::size_t count, FloatRows out);
    void (*divide)(float* row, std::size_t width, float by);
    // Merges `rows` results of `width` floats, any number, into those of the positions before.
    void (*merge)(float* into, float* into_lse, const float* right, const float* right_lse, std::size_t rows,
                  std::size_t width);
};

// Where the pages of a span lie.
struct PageSpan {
    const std::int64_t* addresses;
    const std::int32_t* codecs;
    std::size_t pages;
    std::int64_t position;
    std::int64_t tokens;
    std::int64_t stop() const { return position + tokens; }
};

// The layer of a call in the pages of one codec. Its shape has one plane where this is latent.
struct CodedLayer {
    std::int32_t codec;
    LayerShape shape;
    std::size_t offset;  // within a page
};

struct AttentionCall {
    const float* query;  // [tokens, query_heads, key_dim]
    const std::int64_t* positions;
    float* out;  // [tokens, query_heads, value_dim]
    float* lse;  // [tokens, query_heads]
    std::size_t tokens, query_heads;

    Number number;
    std::size_t block_tokens, page_heads, key_dim, value_dim;
    std::size_t head_start, head_stop;
    std::vector<CodedLayer> codecs;

    ScoreShape shape;
    std::int64_t window;  // 0: none
    bool causal;
    std::size_t level, index;  // of the subtree
    std::vector<std::pair<std::int64_t, std::int64_t>> limits;  // positions that count for each token; empty: the subtree's

    std::vector<std::size_t> starts;  // of rows, and the end
    std::vector<PageSpan> spans;      // distinct, and not empty
    std::vector<std::vector<std::uint32_t>> row_spans;
    std::size_t threads;
    std::int64_t deadline_ns;  // of CLOCK_MONOTONIC; 0: none

    std::size_t group() const { return query_heads / (head_stop - head_start); }
};

// The positions of a subtree.
inline std::pair<std::int64_t, std::int64_t> limits_of(std::size_t level, std::size_t index) {
    return {static_cast<std::int64_t>(index * kCutTokens << level), static_cast<std::int64_t>((index + 1) * kCutTokens << level)};
}

// Carries it out. The call must be consistent: the binding checks it. False, and no result, once the deadline has passed:
// each thread looks at it before each cut.
bool attend(const Kernels& kernels, const AttentionCall& call);

}  // namespace kvc
