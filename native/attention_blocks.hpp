// Blocks: query tokens of a call that are worked on together, and which of them read which span. A span that several of them
// name is one segment, which is read once for all. Included by attention.cpp alone.
#pragma once

#include <algorithm>
#include <limits>
#include <utility>

#include "attention.hpp"

namespace kvc {

using u8 = std::uint8_t;
using i64 = std::int64_t;

constexpr std::size_t kQueriesAtOnce = 128;  // their scores for a cut are 256 KiB, and stay in a cache

// Queries, from the block's first, that name a span.
struct Readers {
    std::size_t start, stop;
};

struct Segment {
    const PageSpan* span;
    std::vector<Readers> readers;  // apart and in order
};

// Query tokens that are worked on together, and the spans that they name, in the order of their positions.
struct Block {
    std::size_t first, stop;  // tokens
    i64 seen_start, seen_stop;  // positions that any of them sees
    std::vector<Segment> segments;
};

// Positions that a query sees.
struct Bounds {
    i64 start, stop;
};

inline Bounds bounds_of(const AttentionCall& call, std::size_t token) {
    const auto [from, to] = call.limits.empty() ? limits_of(call.level, call.index) : call.limits[token];
    const i64 last = call.causal ? call.positions[token] + 1 : to;
    const i64 first = call.window ? last - call.window : 0;
    return {std::clamp(first, from, to), std::clamp(last, from, to)};
}

// Adds what one token of the block sees and reads. `segment_of`: the segment of each span, if it has one.
inline void add_token(const AttentionCall& call, Block& block, std::size_t token, std::size_t row,
                      std::vector<std::size_t>& segment_of) {
    const Bounds seen = bounds_of(call, token);
    if (seen.start < seen.stop) {
        block.seen_start = std::min(block.seen_start, seen.start);
        block.seen_stop = std::max(block.seen_stop, seen.stop);
    }
    const std::size_t query = (token - block.first) * call.group();
    for (const std::uint32_t span : call.row_spans[row]) {
        if (segment_of[span] == SIZE_MAX) {
            segment_of[span] = block.segments.size();
            block.segments.push_back({&call.spans[span], {}});
        }
        std::vector<Readers>& readers = block.segments[segment_of[span]].readers;
        if (!readers.empty() && readers.back().stop == query)
            readers.back().stop += call.group();
        else
            readers.push_back({query, query + call.group()});
    }
}

inline std::vector<Block> blocks_of(const AttentionCall& call) {
    const std::size_t most = std::max<std::size_t>(1, kQueriesAtOnce / call.group());
    std::vector<Block> blocks;
    std::size_t row = 0;
    for (std::size_t first = 0; first < call.tokens; first += most) {
        Block block{first, std::min(first + most, call.tokens), std::numeric_limits<i64>::max(), 0, {}};
        std::vector<std::size_t> segment_of(call.spans.size(), SIZE_MAX);
        for (std::size_t token = first; token < block.stop; token++) {
            while (call.starts[row + 1] <= token) row++;
            add_token(call, block, token, row, segment_of);
        }
        std::stable_sort(block.segments.begin(), block.segments.end(), [](const Segment& a, const Segment& b) {
            return a.span->position < b.span->position;
        });
        blocks.push_back(std::move(block));
    }
    return blocks;
}

}  // namespace kvc
