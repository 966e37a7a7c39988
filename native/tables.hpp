// The names of the tables of one instruction set, from what CMakeLists.txt defines as KVC_ISA: kernels_avx2, codecs_avx2.
#pragma once

#define KVC_JOIN_(a, b) a##_##b
#define KVC_JOIN(a, b) KVC_JOIN_(a, b)
#define KVC_TEXT_(a) #a
#define KVC_TEXT(a) KVC_TEXT_(a)
#define KVC_TABLE(kind) KVC_JOIN(kind, KVC_ISA)
