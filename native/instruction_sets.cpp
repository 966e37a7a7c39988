// Which instruction sets were compiled, and which of them this CPU has.
#include "kernels.hpp"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace kvc {

#if defined(__x86_64__)

namespace {

// Asked of the CPU, since Clang's __builtin_cpu_supports does not know F16C.
bool has_f16c_and_fma() {
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C) && (c & bit_FMA);
}

}  // namespace

extern const Kernels kernels_plain, kernels_avx2, kernels_avx512;

std::vector<const Kernels*> kernels_here() {
    std::vector<const Kernels*> here{&kernels_plain};
    if (!__builtin_cpu_supports("avx2") || !has_f16c_and_fma()) return here;
    here.push_back(&kernels_avx2);
    if (__builtin_cpu_supports("avx512f")) here.push_back(&kernels_avx512);
    return here;
}

#elif defined(__aarch64__)

extern const Kernels kernels_neon;

std::vector<const Kernels*> kernels_here() { return {&kernels_neon}; }

#else

extern const Kernels kernels_plain;

std::vector<const Kernels*> kernels_here() { return {&kernels_plain}; }

#endif

}  // namespace kvc
