// Transposing a matrix of 16-bit numbers between two memories: KV whose tokens lie beside each other, as vLLM keeps K on a
// CPU, against pages, in which the numbers of one token do.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace kvc {

constexpr std::size_t kTile = 8;  // numbers of a register, and rows and columns of a tile

typedef std::uint16_t TileRow __attribute__((vector_size(2 * kTile)));

// The tile of `from` that begins there, transposed.
inline void transposed(TileRow* tile, const std::uint8_t* from, std::ptrdiff_t stride) {
    for (std::size_t i = 0; i < kTile; i++) std::memcpy(&tile[i], from + static_cast<std::ptrdiff_t>(i) * stride, sizeof *tile);
    TileRow next[kTile];
    for (int round = 0; round < 3; round++) {  // interleaving rows that are half a tile apart, three times, transposes it
        for (std::size_t i = 0; i < kTile / 2; i++) {
            next[2 * i] = __builtin_shufflevector(tile[i], tile[i + kTile / 2], 0, 8, 1, 9, 2, 10, 3, 11);
            next[2 * i + 1] = __builtin_shufflevector(tile[i], tile[i + kTile / 2], 4, 12, 5, 13, 6, 14, 7, 15);
        }
        std::memcpy(tile, next, sizeof next);
    }
}

// into[column][row] = from[row][column]. Strides are in bytes; `rows` and `columns` are multiples of kTile. Whole rows of
// `into` are written one after the other: with `past_caches` past the caches, if they are aligned; then the caller fences.
inline void transpose(std::uint8_t* into, std::ptrdiff_t into_stride, const std::uint8_t* from, std::ptrdiff_t from_stride,
                      std::size_t rows, std::size_t columns, bool past_caches) {
    constexpr std::size_t kMostTiles = 8;
    TileRow tiles[kMostTiles][kTile];
    const bool aligned = (reinterpret_cast<std::uintptr_t>(into) | static_cast<std::uintptr_t>(into_stride)) % sizeof(TileRow) == 0;
    for (std::size_t start = 0; start < rows; start += kMostTiles * kTile) {
        const std::size_t count = std::min(kMostTiles, (rows - start) / kTile);
        for (std::size_t column = 0; column < columns; column += kTile) {
            for (std::size_t at = 0; at < count; at++) {
                const auto row = static_cast<std::ptrdiff_t>(start + at * kTile);
                transposed(tiles[at], from + row * from_stride + 2 * column, from_stride);
            }
            for (std::size_t i = 0; i < kTile; i++) {
                std::uint8_t* to = into + static_cast<std::ptrdiff_t>(column + i) * into_stride + 2 * start;
                for (std::size_t at = 0; at < count; at++, to += sizeof(TileRow)) {
#if defined(__SSE2__)
                    if (past_caches && aligned) {
                        _mm_stream_si128(reinterpret_cast<__m128i*>(to), reinterpret_cast<const __m128i&>(tiles[at][i]));
                        continue;
                    }
#endif
                    std::memcpy(to, &tiles[at][i], sizeof(TileRow));
                }
            }
        }
    }
    (void)aligned, (void)past_caches;
}

}  // namespace kvc
