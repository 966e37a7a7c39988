// Which instruction sets were compiled, and which of them this CPU has.
#include "kernels.hpp"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace kvc {

#if defined(__x86_64__)

namespace {

// Asked of the CPU itself: Clang's __builtin_cpu_supports does not know F16C, and with Zig's runtime, of which wheels are
// made, it says no to everything.
struct Cpu {
    bool avx2 = false;  // and FMA and F16C, which every CPU with AVX2 has but some emulators lack
    bool avx512 = false;
};

// The registers that the operating system saves when it switches threads (XCR0).
unsigned saved_registers() {
    unsigned low, high;
    asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return low;
}

Cpu cpu() {
    constexpr unsigned kYmm = 0x06, kZmm = 0xe6;
    constexpr unsigned kNeeded = bit_OSXSAVE | bit_AVX | bit_FMA | bit_F16C;
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || (c & kNeeded) != kNeeded) return {};
    const unsigned saved = saved_registers();
    if ((saved & kYmm) != kYmm || !__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(b & bit_AVX2)) return {};
    return {true, (saved & kZmm) == kZmm && (b & bit_AVX512F)};
}

}  // namespace

extern const Kernels kernels_plain, kernels_avx2, kernels_avx512;

std::vector<const Kernels*> kernels_here() {
    const Cpu here = cpu();
    std::vector<const Kernels*> kernels{&kernels_plain};
    if (here.avx2) kernels.push_back(&kernels_avx2);
    if (here.avx512) kernels.push_back(&kernels_avx512);
    return kernels;
}

#elif defined(__aarch64__)

extern const Kernels kernels_neon;

std::vector<const Kernels*> kernels_here() { return {&kernels_neon}; }

#else

extern const Kernels kernels_plain;

std::vector<const Kernels*> kernels_here() { return {&kernels_plain}; }

#endif

}  // namespace kvc
