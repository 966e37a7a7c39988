#include "codecs.hpp"

#include <algorithm>
#include <cstring>

namespace kvc {

using u8 = std::uint8_t;

void LayerShape::add(const PlaneShape& plane) {
    planes.push_back(plane);
    raw_bytes += plane.raw_bytes;
    coded_bytes += plane.coded_bytes;
    if (plane.coding != Coding::kRaw) scratch = std::max(scratch, scratch_floats(plane));
}

PlaneRows dense_rows(const PlaneShape& plane, u8* base) {
    const std::size_t token = plane.raw_bytes / plane.tokens, head = token / plane.heads;
    return {base, static_cast<std::ptrdiff_t>(token), static_cast<std::ptrdiff_t>(head), 0, plane.heads, nullptr, false};
}

bool encode_layer(const Codecs& codecs, const LayerShape& layer, const u8* raw, u8* into, float* scratch) {
    for (const PlaneShape& plane : layer.planes) {
        if (plane.coding == Coding::kRaw) std::memcpy(into, raw, plane.raw_bytes);
        else if (!codecs.encode(plane, raw, into, scratch)) return false;
        raw += plane.raw_bytes;
        into += plane.coded_bytes;
    }
    return true;
}

void decode_layer(const Codecs& codecs, const LayerShape& layer, const u8* coded, u8* into, float* scratch) {
    for (const PlaneShape& plane : layer.planes) {
        if (plane.coding == Coding::kRaw) {
            std::memcpy(into, coded, plane.raw_bytes);
        } else {
            codecs.decode(plane, coded, dense_rows(plane, into), scratch);
        }
        coded += plane.coded_bytes;
        into += plane.raw_bytes;
    }
}

void add_squares(const Codecs& codecs, const LayerShape& layer, const u8* raw, const u8* decoded, Squares* planes) {
    for (const PlaneShape& plane : layer.planes) {
        if (plane.coding != Coding::kRaw) codecs.add_squares(plane, raw, decoded, planes);
        raw += plane.raw_bytes;
        decoded += plane.raw_bytes;
        planes++;
    }
}

}  // namespace kvc
