// Transposing a matrix of 16-bit numbers between two memories: KV whose tokens lie beside each other, as vLLM keeps K on a
// CPU, against pages, in which the numbers of one token do.
//
// Compiled once for each instruction set, so with internal linkage, as lanes.hpp.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kvc {
namespace {

constexpr std::ptrdiff_t kTilesAhead = 2048;  // so many bytes ahead is prefetched: found by trying
constexpr std::size_t kLineNumbers = 32;      // of 16 bits, in a line of the cache

typedef std::uint16_t TileRow __attribute__((vector_size(2 * kTile)));

// A tile: kTile rows of kTile numbers.
struct Tile {
    typedef TileRow Row;
    static constexpr std::size_t kRows = kTile;

    static inline __attribute__((always_inline)) Row load(const std::uint8_t* from, std::ptrdiff_t) {
        TileRow row;
        std::memcpy(&row, from, sizeof row);
        return row;
    }
    static inline __attribute__((always_inline)) Row low(Row a, Row b) {
        return __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
    }
    static inline __attribute__((always_inline)) Row high(Row a, Row b) {
        return __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
    }
    static inline __attribute__((always_inline)) void stream(std::uint8_t* into, Row row) {
#if defined(__x86_64__)
        _mm_stream_si128(reinterpret_cast<__m128i*>(into), reinterpret_cast<const __m128i&>(row));
#else
        std::memcpy(into, &row, sizeof row);
#endif
    }
};

#if defined(__AVX2__)

// Two tiles, one below the other: a register has a row of each.
struct TilePair {
    typedef std::uint16_t Row __attribute__((vector_size(4 * kTile)));
    static constexpr std::size_t kRows = 2 * kTile;

    static inline __attribute__((always_inline)) Row load(const std::uint8_t* from, std::ptrdiff_t stride) {
        const TileRow upper = Tile::load(from, stride);
        const TileRow lower = Tile::load(from + static_cast<std::ptrdiff_t>(kTile) * stride, stride);
        return __builtin_shufflevector(upper, lower, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    }
    static inline __attribute__((always_inline)) Row low(Row a, Row b) {
        return __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 8, 24, 9, 25, 10, 26, 11, 27);
    }
    static inline __attribute__((always_inline)) Row high(Row a, Row b) {
        return __builtin_shufflevector(a, b, 4, 20, 5, 21, 6, 22, 7, 23, 12, 28, 13, 29, 14, 30, 15, 31);
    }
    static inline __attribute__((always_inline)) void stream(std::uint8_t* into, Row row) {
        _mm256_stream_si256(reinterpret_cast<__m256i*>(into), reinterpret_cast<const __m256i&>(row));
    }
};

#else

typedef Tile TilePair;

#endif

// Interleaves rows that are half a tile apart. Three times, that transposes a tile.
template <class Of>
inline __attribute__((always_inline)) void interleave(typename Of::Row* into, const typename Of::Row* rows) {
#pragma GCC unroll 4
    for (std::size_t i = 0; i < kTile / 2; i++) {
        into[2 * i] = Of::low(rows[i], rows[i + kTile / 2]);
        into[2 * i + 1] = Of::high(rows[i], rows[i + kTile / 2]);
    }
}

template <class Of>
inline __attribute__((always_inline)) void transpose_tile(std::uint8_t* into, std::ptrdiff_t into_stride, const std::uint8_t* from,
                                                          std::ptrdiff_t from_stride, bool past_caches) {
    typename Of::Row rows[kTile], other[kTile];
#pragma GCC unroll 8
    for (std::size_t i = 0; i < kTile; i++) rows[i] = Of::load(from + static_cast<std::ptrdiff_t>(i) * from_stride, from_stride);
    interleave<Of>(other, rows);
    interleave<Of>(rows, other);
    interleave<Of>(other, rows);
    if (past_caches) {
#pragma GCC unroll 8
        for (std::size_t i = 0; i < kTile; i++) Of::stream(into + static_cast<std::ptrdiff_t>(i) * into_stride, other[i]);
        return;
    }
#pragma GCC unroll 8
    for (std::size_t i = 0; i < kTile; i++)
        std::memcpy(into + static_cast<std::ptrdiff_t>(i) * into_stride, &other[i], sizeof other[i]);
}

// As Kernels::transpose. A line of each of kTile rows of `into` is written at a time: as many lines as a core combines.
void transpose(std::uint8_t* into, std::ptrdiff_t into_stride, const std::uint8_t* from, std::ptrdiff_t from_stride,
               std::size_t rows, std::size_t columns, Touches touches) {
    const std::uintptr_t bits = reinterpret_cast<std::uintptr_t>(into) | static_cast<std::uintptr_t>(into_stride);
    const bool past_caches = touches == Touches::kTarget && bits % sizeof(TilePair::Row) == 0;
    for (std::size_t line = 0; line < rows; line += kLineNumbers) {
        const std::size_t stop = std::min(rows, line + kLineNumbers);
        for (std::size_t column = 0; column < columns; column += kTile) {
            std::uint8_t* const to = into + static_cast<std::ptrdiff_t>(column) * into_stride;
            for (std::size_t row = line; row < stop;) {
                const std::uint8_t* const tile = from + static_cast<std::ptrdiff_t>(row) * from_stride + 2 * column;
                if (touches == Touches::kSource && column % kLineNumbers == 0)
                    for (std::size_t i = 0; i < TilePair::kRows; i += 2)
                        __builtin_prefetch(tile + static_cast<std::ptrdiff_t>(i) * from_stride + kTilesAhead);
                if (stop - row >= TilePair::kRows) {
                    transpose_tile<TilePair>(to + 2 * row, into_stride, tile, from_stride, past_caches);
                    row += TilePair::kRows;
                } else {
                    transpose_tile<Tile>(to + 2 * row, into_stride, tile, from_stride, past_caches);
                    row += Tile::kRows;
                }
            }
        }
    }
}

}  // namespace
}  // namespace kvc
