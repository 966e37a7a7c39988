// The codecs of one plane of a layer (docs/codecs.md draws the bytes), as a table for each instruction set. They know
// nothing of pages or Python, allocate nothing, and write exactly what the layout says.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvc {

enum class Number { kBfloat16, kFloat16, kFloat32 };

enum class Coding {
    kRaw,       // the bytes as they are
    kRows,      // q8: each (token, head) with a scale and a minimum
    kChannels,  // q4: each (head, channel) over the tokens
    kGroups,    // q4: each (token, head) in groups of 32 channels
};

// [tokens, heads, dim] of one plane and layer. Of a raw one, only `coding` and the bytes are read.
struct PlaneShape {
    Coding coding;
    Number number;
    std::size_t tokens;
    std::size_t heads;
    std::size_t dim;  // a multiple of 8
    std::size_t raw_bytes;
    std::size_t coded_bytes;
};

// As many floats as the codecs of a plane may write to `scratch`: two for each channel, in whole runs of 32.
inline std::size_t scratch_floats(const PlaneShape& plane) { return 2 * plane.heads * ((plane.dim + 31) / 32 * 32); }

// Where decoded rows go, for heads `head_start` to `head_stop` of the plane: that of (token, head) to
// base + token * token_stride + (head - head_start) * head_stride.
struct PlaneRows {
    std::uint8_t* base;
    std::ptrdiff_t token_stride;
    std::ptrdiff_t head_stride;
    std::size_t head_start;
    std::size_t head_stop;
    const std::uint8_t* ahead;  // is prefetched meanwhile, as many bytes as the encoded plane has; null if nothing is
    bool aligned;  // all rows begin at multiples of Kernels::align; then they go past the caches, and the caller fences
};

// The squares of what was lost, and of what there was.
struct Squares {
    double lost = 0, whole = 0;
};

// For planes that are not raw.
struct Codecs {
    // False if the plane holds what cannot be encoded: NaN, infinities, or numbers that are too large. `into` is undefined
    // then.
    bool (*encode)(const PlaneShape& plane, const std::uint8_t* raw, std::uint8_t* into, float* scratch);
    void (*decode)(const PlaneShape& plane, const std::uint8_t* coded, const PlaneRows& into, float* scratch);
    // Adds the difference between a raw plane and a decoded one.
    void (*add_squares)(const PlaneShape& plane, const std::uint8_t* raw, const std::uint8_t* decoded, Squares* sums);
};

}  // namespace kvc
