// The table of codecs of one instruction set. Compiled once for each.
#include "planes.hpp"

#include "decode.hpp"
#include "encode.hpp"
#include "tables.hpp"

namespace kvc {
namespace {

template <typename N>
bool encode_plane(const PlaneShape& plane, const u8* raw, u8* into, float* scratch) {
    if (!encodable<N>(raw, plane.tokens * plane.heads * plane.dim)) return false;
    if (plane.coding == Coding::kChannels) return encode_channels<N>(plane, raw, into, scratch);
    if (plane.coding == Coding::kGroups) return encode_groups<N>(plane, raw, into);
    encode_rows<N>(plane, raw, into);
    return true;
}

template <typename N, bool kPast>
void decode_plane(const PlaneShape& plane, const u8* coded, const PlaneRows& into, float* scratch) {
    if (plane.coding == Coding::kChannels)
        decode_channels<N, kPast>(plane, coded, into, scratch);
    else if (plane.coding == Coding::kGroups)
        decode_groups<N, kPast>(plane, coded, into);
    else
        decode_rows<N, kPast>(plane, coded, into);
}

template <typename N>
void add_squares_of(const PlaneShape& plane, const u8* raw, const u8* decoded, Squares* sums) {
    for (std::size_t at = 0; at < plane.raw_bytes; at += kNarrow * N::kBytes) {
        const NarrowFloats before = N::narrow_of(raw + at), after = N::narrow_of(decoded + at);
        for (std::size_t lane = 0; lane < kNarrow; lane++) {
            const double x = before[lane], lost = after[lane] - x;
            sums->lost += lost * lost;
            sums->whole += x * x;
        }
    }
}

bool encode(const PlaneShape& plane, const u8* raw, u8* into, float* scratch) {
    if (plane.number == Number::kBfloat16) return encode_plane<Bfloat16>(plane, raw, into, scratch);
    if (plane.number == Number::kFloat16) return encode_plane<Float16>(plane, raw, into, scratch);
    return encode_plane<Float32>(plane, raw, into, scratch);
}

template <bool kPast>
void decode_to(const PlaneShape& plane, const u8* coded, const PlaneRows& into, float* scratch) {
    if (plane.number == Number::kBfloat16) return decode_plane<Bfloat16, kPast>(plane, coded, into, scratch);
    if (plane.number == Number::kFloat16) return decode_plane<Float16, kPast>(plane, coded, into, scratch);
    decode_plane<Float32, kPast>(plane, coded, into, scratch);
}

void decode(const PlaneShape& plane, const u8* coded, const PlaneRows& into, float* scratch) {
    into.aligned ? decode_to<true>(plane, coded, into, scratch) : decode_to<false>(plane, coded, into, scratch);
}

void add_squares(const PlaneShape& plane, const u8* raw, const u8* decoded, Squares* sums) {
    if (plane.number == Number::kBfloat16) return add_squares_of<Bfloat16>(plane, raw, decoded, sums);
    if (plane.number == Number::kFloat16) return add_squares_of<Float16>(plane, raw, decoded, sums);
    add_squares_of<Float32>(plane, raw, decoded, sums);
}

}  // namespace

extern const Codecs KVC_TABLE(codecs);
const Codecs KVC_TABLE(codecs){encode, decode, add_squares};

}  // namespace kvc
