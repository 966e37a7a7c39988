// The codecs of pages (kvcluster/core/codecs.py draws their bytes), for planes of whole layers. Bytes in, bytes out: they
// know nothing of pages or Python, allocate nothing, and write exactly what the layout says.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvc {

enum class Number { kBfloat16, kFloat16, kFloat32 };

enum class Coding {
    kRaw,       // the bytes as they are
    kRows,      // q8: each (token, head) with a scale and a minimum
    kChannels,  // q4: each (head, channel) over the tokens
    kGroups,    // q4: each (token, head) in groups of 32 channels
};

// [tokens, heads, dim] of one plane and layer.
struct PlaneShape {
    Coding coding;
    Number number;    // unless it is raw
    std::size_t dim;  // unless it is raw: a multiple of 8
    std::size_t raw_bytes;
    std::size_t coded_bytes;
};

struct LayerShape {
    std::size_t tokens;
    std::size_t heads;
    std::vector<PlaneShape> planes;
    std::size_t raw_bytes;
    std::size_t coded_bytes;
    std::size_t channels;  // heads * dim of the widest plane
};

// As many floats as `encode_layer` and `decode_layer` may scribble on.
inline std::size_t scratch_floats(const LayerShape& layer) { return 2 * layer.channels; }

// False where it holds what cannot be encoded: NaN, infinities, or numbers that are too large. `into` is undefined then.
bool encode_layer(const LayerShape& layer, const std::uint8_t* raw, std::uint8_t* into, float* scratch);
void decode_layer(const LayerShape& layer, const std::uint8_t* coded, std::uint8_t* into, float* scratch);

// Of one plane: the squares of what was lost, and of what there was.
struct Squares {
    double lost = 0, whole = 0;
};

// Adds, for each plane that is encoded, what lies between a raw layer and a decoded one.
void add_squares(const LayerShape& layer, const std::uint8_t* raw, const std::uint8_t* decoded, Squares* planes);

}  // namespace kvc
