// What the kernels of one instruction set can do. Bytes in, bytes and sums out: they know nothing of pages or Python,
// allocate nothing, and read and write exactly what they are given.
#pragma once

#include <cstddef>
#include <cstdint>

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

struct Kernels {
    const char* name;
    // The XXH3 sum of each layer of `data`.
    void (*sums)(const std::uint8_t* data, const Layers& layers, std::uint64_t* sums);
    // Copies `data` to `into`, which do not overlap; the sums are those of the bytes that were written there, whatever
    // happens to `data` meanwhile.
    void (*copy_sums)(std::uint8_t* into, const std::uint8_t* data, const Layers& layers, std::uint64_t* sums);
};

extern const Kernels kernels_avx2;
extern const Kernels kernels_avx512;

}  // namespace kvc
