// XXH3 with 64 bits and a seed, of bytes that are copied at the same time. Compiled once for each instruction set.
//
// A stripe of 64 bytes is loaded once; what is hashed and what is stored are the same registers, so that a sum vouches
// for the copy even if the original is written to meanwhile, and the bytes cross the memory bus twice and not three
// times. The stores go past the caches, since the next reader of a page is another core, a GPU, or comes after more bytes
// than a cache holds.
//
// The hash is that of the xxHash specification (doc/xxhash_spec.md of its repository, "XXH3", inputs of more than 240
// bytes), and equal to the xxhash package's: tests/pages/test_native.py.
#include "kernels.hpp"

#include <cstring>
#include <type_traits>

#include "stripe.hpp"
#include "tables.hpp"
#include "transpose.hpp"

namespace kvc {
namespace {

constexpr u64 kPrime32_2 = 0x85EBCA77, kPrime32_3 = 0xC2B2AE3D;
constexpr u64 kPrime64_1 = 0x9E3779B185EBCA87, kPrime64_2 = 0xC2B2AE3D27D4EB4F, kPrime64_3 = 0x165667B19E3779F9;
constexpr u64 kPrime64_4 = 0x85EBCA77C2B2AE63, kPrime64_5 = 0x27D4EB2F165667C5, kPrimeMx1 = 0x165667919E3779F9;

constexpr std::size_t kSecretBytes = 192, kStripesPerBlock = (kSecretBytes - kStripe) / 8;
constexpr std::size_t kPrefetch = 1024;  // so far ahead is read: found by trying

alignas(64) constexpr u8 kSecret[kSecretBytes] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

u64 load64(const u8* from) {
    u64 value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

// ------------------------------------------------------------------------------------------------------ XXH3

u64 folded(u64 a, u64 b) {
    __extension__ using u128 = unsigned __int128;
    const u128 product = static_cast<u128>(a) * b;
    return static_cast<u64>(product) ^ static_cast<u64>(product >> 64);
}

struct Secret {
    alignas(64) u8 bytes[kSecretBytes];

    explicit Secret(u64 seed) {
        for (std::size_t at = 0; at < kSecretBytes; at += 16) {
            const u64 low = load64(kSecret + at) + seed, high = load64(kSecret + at + 8) - seed;
            std::memcpy(bytes + at, &low, 8);
            std::memcpy(bytes + at + 8, &high, 8);
        }
    }
    Stripe at(std::size_t offset) const { return Stripe::load(bytes + offset); }
};

// The sums of no bytes.
Stripe start() {
    alignas(64) static constexpr u64 lanes[8] = {kPrime32_3, kPrime64_1, kPrime64_2, kPrime64_3,
                                                 kPrime64_4, kPrime32_2, kPrime64_5, kPrime32_1};
    return Stripe::load(reinterpret_cast<const u8*>(lanes));
}

u64 finish(const u64* lanes, const Secret& secret, std::size_t nbytes) {
    u64 result = nbytes * kPrime64_1;
    for (int i = 0; i < 4; i++) {
        const u8* key = secret.bytes + 11 + 16 * i;
        result += folded(lanes[2 * i] ^ load64(key), lanes[2 * i + 1] ^ load64(key + 8));
    }
    result ^= result >> 37;
    result *= kPrimeMx1;
    return result ^ (result >> 32);
}

enum class To { kNowhere, kMemory, kPastCaches };

template <To to>
inline __attribute__((always_inline)) void put(const Stripe& stripe, u8* into) {
    if constexpr (to == To::kMemory) stripe.store(into);
    if constexpr (to == To::kPastCaches) stripe.stream(into);
}

// The sum of `nbytes` bytes, at least kLeastLayerBytes, which are also put `to` where `into` says.
template <To to>
u64 sum(u8* into, const u8* data, std::size_t nbytes, u64 seed) {
    const Secret secret(seed);
    const Stripe scrambler = secret.at(kSecretBytes - kStripe);
    alignas(64) u64 lanes[8];
    Stripe sums = start();

    // The last stripe stands alone, and reaches back where it would not be whole.
    const std::size_t stripes = (nbytes - 1) / kStripe, blocks = stripes / kStripesPerBlock;
    std::size_t at = 0;
    const auto take = [&](std::size_t number) __attribute__((always_inline)) {
        __builtin_prefetch(data + at + kPrefetch);
        const Stripe stripe = Stripe::load(data + at);
        sums.add(stripe, secret.at(8 * number));
        put<to>(stripe, into + at);
        at += kStripe;
    };
    for (std::size_t block = 0; block < blocks; block++) {
        for (std::size_t number = 0; number < kStripesPerBlock; number++) take(number);
        sums.scramble(scrambler);
    }
    for (std::size_t number = 0; number < stripes - blocks * kStripesPerBlock; number++) take(number);

    alignas(64) u8 tail[kStripe];
    const Stripe last = Stripe::load(data + nbytes - kStripe);
    last.store(tail);
    sums.add(last, secret.at(kSecretBytes - kStripe - 7));
    if constexpr (to != To::kNowhere) std::memcpy(into + at, tail + kStripe - (nbytes - at), nbytes - at);

    sums.store(reinterpret_cast<u8*>(lanes));
    return finish(lanes, secret, nbytes);
}

// ----------------------------------------------------------------------------------------------------- rows

constexpr std::size_t kAhead = 4096;  // so many bytes ahead are rows prefetched that are read: found by trying

// Hands out contiguous bytes, `step` at a time.
struct Run {
    u8* at;

    inline __attribute__((always_inline)) u8* next(std::size_t step) {
        u8* const here = at;
        at += step;
        return here;
    }
};

// Hands out the bytes of rows, `step` at a time: plane after plane.
struct Walk {
    const Rows* rows;
    u8* at;
    u8* group;
    std::size_t left, inner, outer;

    explicit Walk(const Rows* first) : rows(first) { open(); }

    void open() {
        at = group = rows->base;
        left = rows->run;
        inner = rows->inner;
        outer = rows->outer;
    }
    inline __attribute__((always_inline)) u8* next(std::size_t step) {
        u8* const here = at;
        at += step;
        left -= step;
        if (!left) turn();
        return here;
    }
    inline __attribute__((always_inline)) void turn() {
        left = rows->run;
        if (--inner) {
            at += rows->inner_stride - static_cast<std::ptrdiff_t>(rows->run);
        } else if (--outer) {
            inner = rows->inner;
            at = group += rows->outer_stride;
        } else {
            ++rows;
            open();
        }
    }
};

// In place of a walk that runs ahead of what is read: that is one run.
struct NoWalk {};

// A sum over bytes that come in several parts.
struct Running {
    Secret secret;
    Stripe sums = start();
    std::size_t nbytes = 0;

    explicit Running(u64 seed) : secret(seed) {}

    // Adds a part: a multiple of kStep bytes, copied between places that hand out kStep bytes at a time. `last` says
    // whether the sum ends with it; any other is whole blocks.
    template <To to, std::size_t kStep, class From, class Into, class Ahead>
    void add(Into& into, From& from, Ahead& ahead, std::size_t part, bool last) {
        constexpr std::size_t kStripes = kStep / kStripe, kBlock = kStripe * kStripesPerBlock;
        static_assert(kBlock == kSegmentBytes);
        const Secret keys = secret;  // what is written may be anything that is not local
        const Stripe scrambler = keys.at(kSecretBytes - kStripe);
        Stripe lanes = sums;
        const auto take = [&](std::size_t number, std::size_t end) __attribute__((always_inline)) {
            const u8* const data = from.next(kStep);
            u8* const place = into.next(kStep);
            const u8* fetch = data + kPrefetch;
            if constexpr (std::is_same_v<Ahead, Walk>) fetch = ahead.next(kStep);
#pragma GCC unroll 16
            for (std::size_t i = 0; i < kStripes; i++) {
                __builtin_prefetch(fetch + i * kStripe);
                const Stripe stripe = Stripe::load(data + i * kStripe);
                const std::size_t key = number + i == end ? kSecretBytes - kStripe - 7 : 8 * (number + i);
                lanes.add(stripe, keys.at(key));
                put<to>(stripe, place + i * kStripe);
            }
        };
        const std::size_t blocks = (part - (last ? 1 : 0)) / kBlock;
        for (std::size_t block = 0; block < blocks; block++) {
#pragma GCC unroll 16
            for (std::size_t number = 0; number < kStripesPerBlock; number += kStripes) take(number, kStripesPerBlock);
            lanes.scramble(scrambler);
        }
        const std::size_t rest = part / kStripe - blocks * kStripesPerBlock;
        for (std::size_t number = 0; number < rest; number += kStripes) take(number, rest - 1);
        sums = lanes;
        nbytes += part;
    }
    u64 end() const {
        alignas(64) u64 lanes[8];
        sums.store(reinterpret_cast<u8*>(lanes));
        return finish(lanes, secret, nbytes);
    }
};

template <std::size_t kStep>
u64 scatter_steps(const RowSegment* segments, std::size_t count, const u8* data, u64 seed) {
    Running sum(seed);
    Run from{const_cast<u8*>(data)};
    NoWalk none;
    for (std::size_t i = 0; i < count; i++) {
        const RowSegment& each = segments[i];
        Walk into(each.rows);
        if (each.past_caches) sum.add<To::kPastCaches, kStep>(into, from, none, each.nbytes, i + 1 == count);
        else sum.add<To::kMemory, kStep>(into, from, none, each.nbytes, i + 1 == count);
    }
    return sum.end();
}

template <std::size_t kStep>
u64 gather_steps(u8* into, const Rows* rows, std::size_t nbytes, u64 seed, bool aligned) {
    Walk from(rows), ahead(rows);
    for (std::size_t at = 0; at < kAhead && at < nbytes; at += kStep) ahead.next(kStep);
    Running sum(seed);
    Run to{into};
    if (aligned) sum.add<To::kPastCaches, kStep>(to, from, ahead, nbytes, true);
    else sum.add<To::kMemory, kStep>(to, from, ahead, nbytes, true);
    return sum.end();
}

// What `work` returns for this step, which it is given as a constant.
template <class Work>
u64 by_step(std::size_t step, const Work& work) {
    switch (step) {
        case 64: return work(std::integral_constant<std::size_t, 64>());
        case 128: return work(std::integral_constant<std::size_t, 128>());
        case 256: return work(std::integral_constant<std::size_t, 256>());
        case 512: return work(std::integral_constant<std::size_t, 512>());
        default: return work(std::integral_constant<std::size_t, 1024>());
    }
}

u64 scatter(const RowSegment* segments, std::size_t count, const u8* data, std::size_t step, u64 seed) {
    return by_step(step, [=](auto each) { return scatter_steps<each>(segments, count, data, seed); });
}

u64 gather(u8* into, const Rows* rows, std::size_t nbytes, std::size_t step, u64 seed, bool aligned) {
    return by_step(step, [=](auto each) { return gather_steps<each>(into, rows, nbytes, seed, aligned); });
}

template <To to>
void sum_each(u8* into, const u8* data, const Layers& layers, u64* sums) {
    u64 seed = layers.seed;
    for (std::size_t layer = 0; layer < layers.layers; layer++, seed += layers.seed_step) {
        sums[layer] = sum<to>(into, data, layers.layer_bytes, seed);
        into += to == To::kNowhere ? 0 : layers.layer_bytes;
        data += layers.layer_bytes;
    }
}

void sums(const u8* data, const Layers& layers, u64* sums) { sum_each<To::kNowhere>(nullptr, data, layers, sums); }

void fence() { Stripe::fence(); }

void copy_sums(u8* into, const u8* data, const Layers& layers, u64* sums) {
    const bool aligned = reinterpret_cast<std::uintptr_t>(into) % Stripe::kAlign == 0 &&
                         layers.layer_bytes % Stripe::kAlign == 0;
    if (!aligned) {
        sum_each<To::kMemory>(into, data, layers, sums);
        return;
    }
    sum_each<To::kPastCaches>(into, data, layers, sums);
    fence();
}

void stage_sums(u8* into, const u8* data, const Layers& layers, u64* sums) {
    sum_each<To::kMemory>(into, data, layers, sums);
}

}  // namespace

extern const AttentionKernels KVC_TABLE(attention);
extern const Codecs KVC_TABLE(codecs);
extern const Kernels KVC_TABLE(kernels);
const Kernels KVC_TABLE(kernels){KVC_TEXT(KVC_ISA), Stripe::kAlign,     sums,
                                 copy_sums,         stage_sums,         scatter,
                                 gather,            transpose,          fence,
                                 &KVC_TABLE(codecs), &KVC_TABLE(attention)};

}  // namespace kvc
