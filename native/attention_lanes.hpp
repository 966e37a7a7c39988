// The elementary functions of attention, as kvcluster/attention/arithmetic.py defines them step by step: `fused` where the
// instruction set has a fused multiply-add, `plain` elsewhere.
#pragma once

#include <utility>

#include "attention.hpp"
#include "lanes.hpp"

#if defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace kvc {
namespace {

// a * b + c
KVC_INLINE Floats fma(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
    return _mm512_fmadd_ps(a, b, c);
#elif defined(__FMA__)
    return _mm256_fmadd_ps(a, b, c);
#elif defined(__aarch64__)
    return as<Floats>(vfmaq_f32(as<float32x4_t>(c), as<float32x4_t>(a), as<float32x4_t>(b)));
#else
    return a * b + c;
#endif
}

template <std::size_t kCount>
KVC_INLINE Floats polynomial(Floats x, const float (&coefficients)[kCount]) {
    Floats result = all(coefficients[0]);
#pragma GCC unroll 16
    for (std::size_t i = 1; i < kCount; i++) result = fma(result, x, all(coefficients[i]));
    return result;
}

constexpr float kLog2e = 1.44269504088896341f, kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f;
constexpr float kExp[] = {1.9875691500e-4f, 1.3981999507e-3f, 8.3334519073e-3f,
                          4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f};
constexpr float kLog[] = {7.0376836292e-2f,  -1.1514610310e-1f, 1.1676998740e-1f, -1.2420140846e-1f, 1.4249322787e-1f,
                          -1.6668057665e-1f, 2.0000714765e-1f,  -2.4999993993e-1f, 3.3333331174e-1f};
constexpr float kTanh[] = {-5.70498872745e-3f, 2.06390887954e-2f, -5.37397155531e-2f, 1.33314422036e-1f,
                           -3.33332819422e-1f};

// Of x that is at most 0.
KVC_INLINE Floats exponential(Floats x) {
    const Floats least = all(-87.0f), shift = all(12582912.0f), low = x < least ? least : x;
    const Floats shifted = fma(low, all(kLog2e), shift), n = shifted - shift;
    const Floats r = fma(n, all(-kLn2Low), fma(n, all(-kLn2High), low));
    const Floats result = fma(polynomial(r, kExp), r * r, r) + 1.0f;
    const Floats power = as<Floats>((as<Bits>(shifted) << 23) + (127u << 23));  // the lowest bits of `shifted` are n
    return x < least ? Floats{} : result * power;
}

// Of x that is at least 1.
KVC_INLINE Floats logarithm(Floats x) {
    const Bits bits = as<Bits>(x);
    Floats n = __builtin_convertvector(as<Ints>(bits >> 23) - 126, Floats);
    Floats m = as<Floats>((bits & 0x7FFFFF) | 0x3F000000);
    const Ints small = as<Ints>(m < all(0.70710678f));
    n = small ? n - 1.0f : n;
    m = (small ? m + m : m) - 1.0f;
    const Floats z = m * m;
    Floats y = polynomial(m, kLog) * m * z;
    y = fma(z, all(-0.5f), fma(n, all(kLn2Low), y));
    return x == x ? fma(n, all(kLn2High), m + y) : x;
}

KVC_INLINE Floats hyperbolic_tangent(Floats x) {
    const Bits sign = as<Bits>(x) & 0x80000000;
    const Floats size = as<Floats>(as<Bits>(x) & 0x7FFFFFFF), z = x * x;
    const Floats near = fma(polynomial(z, kTanh) * z, size, size);
    const Floats e = exponential(size * -2.0f), far = (1.0f - e) / (e + 1.0f);
    const Floats result = size < all(0.625f) ? near : far;
    return as<Floats>((as<Bits>(result) & 0x7FFFFFFF) | sign);
}

// Of 16 lanes: i and i + 8, then i and i + 4, and so on.
KVC_INLINE float sum_of_halves(float* lanes) {
    for (std::size_t half = kSumLanes / 2; half; half /= 2)
        for (std::size_t lane = 0; lane < half; lane++) lanes[lane] += lanes[lane + half];
    return lanes[0];
}

// For each block of kBlock lanes, the sums of its halves: a's in the places of the lower half, b's in those of the upper.
template <std::size_t kBlock, std::size_t... kLane>
KVC_INLINE Floats add_halves(Floats a, Floats b, std::index_sequence<kLane...>) {
    constexpr std::size_t kHalf = kBlock / 2;
    const Ints low = {(kLane % kBlock < kHalf ? -1 : 0)...};
#if defined(__clang__) || __GNUC__ >= 12
    const Floats moved = __builtin_shufflevector(a, b, (kLane % kBlock < kHalf ? kLane + kHalf : kLanes + kLane - kHalf)...);
#else
    const Ints from = {static_cast<std::int32_t>(kLane % kBlock < kHalf ? kLane + kHalf : kLanes + kLane - kHalf)...};
    const Floats moved = __builtin_shuffle(a, b, from);
#endif
    return (low ? a : b) + moved;
}

// Lane i is the sum of the lanes of sums[i], added in halves.
template <std::size_t kCount = kLanes>
KVC_INLINE Floats sums_of_halves(Floats* sums) {
    if constexpr (kCount > 1) {
#pragma GCC unroll 8
        for (std::size_t i = 0; i < kCount / 2; i++)
            sums[i] = add_halves<kCount>(sums[i], sums[i + kCount / 2], std::make_index_sequence<kLanes>());
        return sums_of_halves<kCount / 2>(sums);
    } else {
        return sums[0];
    }
}

}  // namespace
}  // namespace kvc
