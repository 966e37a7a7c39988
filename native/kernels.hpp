// What the kernels of one instruction set can do. Bytes in, bytes and sums out: they know nothing of pages or Python,
// allocate nothing, and read and write exactly what they are given.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "attention.hpp"
#include "planes.hpp"

namespace kvc {

// XXH3 hashes what is shorter in other ways, which are not needed here.
constexpr std::size_t kLeastLayerBytes = 241;

// `layers` layers of `layer_bytes` each, one after the other; the seed of the first, and what it grows by.
struct Layers {
    std::size_t layers;
    std::size_t layer_bytes;
    std::uint64_t seed;
    std::uint64_t seed_step;
};

// One plane of one layer of one block, in the order of a page: `outer` times `inner` runs of `run` contiguous bytes.
struct Rows {
    std::uint8_t* base;
    std::size_t run;
    std::size_t inner;
    std::size_t outer;
    std::ptrdiff_t inner_stride;
    std::ptrdiff_t outer_stride;
};

// Planes that are written in the same way. All but the last of a layer are whole kilobytes.
struct RowSegment {
    const Rows* rows;
    std::size_t nbytes;
    bool past_caches;  // all addresses are multiples of Kernels::align; the caller fences
};

constexpr std::size_t kSegmentBytes = 1024;

constexpr std::size_t kTile = 8;  // rows and columns of the tiles by which matrices are transposed

// Which side of a copy is memory; the other one is in a cache.
enum class Touches { kSource, kTarget };

struct Kernels {
    const char* name;
    std::size_t align;  // rows at multiples of it are written past the caches
    // The XXH3 sum of each layer of `data`.
    void (*sums)(const std::uint8_t* data, const Layers& layers, std::uint64_t* sums);
    // Copies `data` to `into`, which do not overlap; the sums are those of the bytes that were written there, whatever
    // happens to `data` meanwhile.
    void (*copy_sums)(std::uint8_t* into, const std::uint8_t* data, const Layers& layers, std::uint64_t* sums);
    // As copy_sums, through the caches: for bytes that are read again at once.
    void (*stage_sums)(std::uint8_t* into, const std::uint8_t* data, const Layers& layers, std::uint64_t* sums);
    // Copies a layer into the rows of these segments, and returns the sum of the bytes that were written. Every run is a
    // multiple of `step`, a power of two from 64 to 1,024. At least one more plane follows those of the last segment, which
    // is not written.
    std::uint64_t (*scatter)(const RowSegment* segments, std::size_t count, const std::uint8_t* data, std::size_t step,
                             std::uint64_t seed);
    // Copies a layer of `nbytes` bytes from rows, and returns their sum; `aligned`: `into` is a multiple of `align`, and
    // so is `nbytes`. As many planes follow as the layer has, which are prefetched, and one more.
    std::uint64_t (*gather)(std::uint8_t* into, const Rows* rows, std::size_t nbytes, std::size_t step,
                            std::uint64_t seed, bool aligned);
    // into[column][row] = from[row][column], of 16-bit numbers. Strides are in bytes; `rows` and `columns` are multiples of
    // kTile. A source in memory is prefetched; to a target there it may write past the caches, so the caller fences.
    void (*transpose)(std::uint8_t* into, std::ptrdiff_t into_stride, const std::uint8_t* from, std::ptrdiff_t from_stride,
                      std::size_t rows, std::size_t columns, Touches touches);
    void (*fence)();  // what is said after it is heard after the bytes are there
    const Codecs* codecs;
    const AttentionKernels* attention;
};

// Those that were compiled and that this CPU can run, the fastest last; at least one.
std::vector<const Kernels*> kernels_here();

}  // namespace kvc
