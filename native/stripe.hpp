// A stripe of 64 bytes in registers: eight lanes of 64 bits, and what XXH3 does with them.
//
// `stream` stores past the caches, at an address that is a multiple of kAlign, and `fence` orders such stores before all
// that follow. `load` reads memory once: an empty piece of assembly keeps the compiler from reading it again where it is
// used again, when another process may have changed it.
//
// Compiled once for each instruction set, so with internal linkage, as lanes.hpp.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#else
#include <atomic>
#endif
#if defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace kvc {
namespace {

using u8 = std::uint8_t;
using u64 = std::uint64_t;

constexpr std::size_t kStripe = 64;
constexpr u64 kPrime32_1 = 0x9E3779B1;

#if defined(__AVX512F__)

struct Stripe {
    static constexpr std::size_t kAlign = 64;
    __m512i v;

    static Stripe load(const u8* from) {
        __m512i v = _mm512_loadu_si512(from);
        __asm__("" : "+v"(v));
        return {v};
    }
    void store(u8* into) const { _mm512_storeu_si512(into, v); }
    void stream(u8* into) const { _mm512_stream_si512(reinterpret_cast<__m512i*>(into), v); }
    void add(const Stripe& data, const Stripe& key) {
        const __m512i mixed = _mm512_xor_si512(data.v, key.v);
        const __m512i product = _mm512_mul_epu32(mixed, _mm512_srli_epi64(mixed, 32));
        const __m512i swapped = _mm512_shuffle_epi32(data.v, _MM_PERM_BADC);
        v = _mm512_add_epi64(product, _mm512_add_epi64(v, swapped));
    }
    static void fence() { _mm_sfence(); }
    void scramble(const Stripe& key) {
        const __m512i x = _mm512_xor_si512(_mm512_xor_si512(v, _mm512_srli_epi64(v, 47)), key.v);
        const __m512i prime = _mm512_set1_epi32(static_cast<int>(kPrime32_1));
        const __m512i high = _mm512_mul_epu32(_mm512_srli_epi64(x, 32), prime);
        v = _mm512_add_epi64(_mm512_mul_epu32(x, prime), _mm512_slli_epi64(high, 32));
    }
};

#elif defined(__AVX2__)

struct Stripe {
    static constexpr std::size_t kAlign = 32;
    __m256i a, b;

    static __m256i get(const u8* from) {
        __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
        __asm__("" : "+x"(half));
        return half;
    }
    static Stripe load(const u8* from) { return {get(from), get(from + 32)}; }
    void store(u8* into) const {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(into), a);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(into + 32), b);
    }
    void stream(u8* into) const {
        _mm256_stream_si256(reinterpret_cast<__m256i*>(into), a);
        _mm256_stream_si256(reinterpret_cast<__m256i*>(into + 32), b);
    }
    static __m256i added(__m256i sum, __m256i data, __m256i key) {
        const __m256i mixed = _mm256_xor_si256(data, key);
        const __m256i product = _mm256_mul_epu32(mixed, _mm256_srli_epi64(mixed, 32));
        return _mm256_add_epi64(product, _mm256_add_epi64(sum, _mm256_shuffle_epi32(data, _MM_SHUFFLE(1, 0, 3, 2))));
    }
    void add(const Stripe& data, const Stripe& key) {
        a = added(a, data.a, key.a);
        b = added(b, data.b, key.b);
    }
    static __m256i scrambled(__m256i sum, __m256i key) {
        const __m256i x = _mm256_xor_si256(_mm256_xor_si256(sum, _mm256_srli_epi64(sum, 47)), key);
        const __m256i prime = _mm256_set1_epi32(static_cast<int>(kPrime32_1));
        const __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(x, 32), prime);
        return _mm256_add_epi64(_mm256_mul_epu32(x, prime), _mm256_slli_epi64(high, 32));
    }
    static void fence() { _mm_sfence(); }
    void scramble(const Stripe& key) {
        a = scrambled(a, key.a);
        b = scrambled(b, key.b);
    }
};

#else

// Four registers of 16 bytes: SSE2, which every x86-64 has, NEON, or what the compiler makes of them.
struct Stripe {
    typedef u64 Pair __attribute__((vector_size(16)));
#if defined(__x86_64__)
    static constexpr std::size_t kAlign = sizeof(Pair);
#else
    static constexpr std::size_t kAlign = 1;  // no stores past the caches
#endif
    Pair pairs[4];

    static Pair get(const u8* from) {
        Pair pair;
        __builtin_memcpy(&pair, from, sizeof pair);
#if defined(__x86_64__)
        __asm__("" : "+x"(pair));
#elif defined(__aarch64__)
        __asm__("" : "+w"(pair));
#else
        __asm__("" : "+m"(pair));
#endif
        return pair;
    }
    // The products of the lower halves of the lanes.
    static Pair product(Pair a, Pair b) {
#if defined(__x86_64__)
        return reinterpret_cast<Pair>(_mm_mul_epu32(reinterpret_cast<__m128i>(a), reinterpret_cast<__m128i>(b)));
#elif defined(__ARM_NEON)
        const uint32x2_t low_a = vmovn_u64(reinterpret_cast<uint64x2_t>(a));
        return reinterpret_cast<Pair>(vmull_u32(low_a, vmovn_u64(reinterpret_cast<uint64x2_t>(b))));
#else
        return (a & 0xFFFFFFFF) * (b & 0xFFFFFFFF);
#endif
    }
    static Stripe load(const u8* from) { return {{get(from), get(from + 16), get(from + 32), get(from + 48)}}; }
    void store(u8* into) const { __builtin_memcpy(into, pairs, sizeof pairs); }
    void stream(u8* into) const {
#if defined(__x86_64__)
        for (int i = 0; i < 4; i++)
            _mm_stream_si128(reinterpret_cast<__m128i*>(into) + i, reinterpret_cast<__m128i>(pairs[i]));
#else
        store(into);
#endif
    }
    static void fence() {
#if defined(__x86_64__)
        _mm_sfence();
#else
        std::atomic_thread_fence(std::memory_order_release);
#endif
    }
    void add(const Stripe& data, const Stripe& key) {
        for (int i = 0; i < 4; i++) {
            const Pair mixed = data.pairs[i] ^ key.pairs[i];
            const Pair swapped = {data.pairs[i][1], data.pairs[i][0]};
            pairs[i] += swapped + product(mixed, mixed >> 32);
        }
    }
    void scramble(const Stripe& key) {
        const Pair prime = {kPrime32_1, kPrime32_1};
        for (int i = 0; i < 4; i++) {
            const Pair x = pairs[i] ^ pairs[i] >> 47 ^ key.pairs[i];
            pairs[i] = product(x, prime) + (product(x >> 32, prime) << 32);
        }
    }
};

#endif

}  // namespace
}  // namespace kvc
