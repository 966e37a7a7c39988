// The codecs of whole layers: their planes one after the other, each encoded or raw.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "planes.hpp"

namespace kvc {

struct LayerShape {
    std::vector<PlaneShape> planes;
    std::size_t raw_bytes = 0;
    std::size_t coded_bytes = 0;
    std::size_t scratch = 0;  // as many floats as the functions below may write to their `scratch`

    void add(const PlaneShape& plane);
};

// The rows of a plane whose tokens and heads lie one after the other, as in a page.
PlaneRows dense_rows(const PlaneShape& plane, std::uint8_t* base);

// False where it holds what cannot be encoded (Codecs::encode). `into` is undefined then.
bool encode_layer(const Codecs& codecs, const LayerShape& layer, const std::uint8_t* raw, std::uint8_t* into, float* scratch);
void decode_layer(const Codecs& codecs, const LayerShape& layer, const std::uint8_t* coded, std::uint8_t* into, float* scratch);

// Adds, for each plane that is encoded, what lies between a raw layer and a decoded one.
void add_squares(const Codecs& codecs, const LayerShape& layer, const std::uint8_t* raw, const std::uint8_t* decoded,
                 Squares* planes);

}  // namespace kvc
