// The few things of CUDA that the kernels use. shim/cuda.h has the same names for a CPU.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;
typedef unsigned char u8;
#define FN __device__ __forceinline__
#define TG
#define PRIVATE
#define BARRIER() __syncthreads()

FN int lane_id() { return threadIdx.x & 31; }
FN float as_float(u32 v) { return __uint_as_float(v); }
FN u32 as_bits(float v) { return __float_as_uint(v); }
FN float fast_exp(float v) { return __expf(v); }
FN float shuffle(float v, int lane) { return __shfl_sync(0xffffffffu, v, lane); }
FN u32 shuffle(u32 v, int lane) { return __shfl_sync(0xffffffffu, v, lane); }
FN float shuffle_xor(float v, int mask) { return __shfl_xor_sync(0xffffffffu, v, mask); }
FN u32 warp_max(u32 v) { return __reduce_max_sync(0xffffffffu, v); }
FN u32 warp_min(u32 v) { return __reduce_min_sync(0xffffffffu, v); }
FN void warp_barrier() { __syncwarp(); }
// Only `count` threads meet here; id 0 is __syncthreads'.
FN void group_barrier(int id, int count) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(count) : "memory"); }
FN void group_arrive(int id, int count) { asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(count) : "memory"); }
FN void held_here(u32& v) { asm volatile("" : "+r"(v)); }  // made by now, and not where it is used
FN u32 permute(u32 a, u32 b, u32 selector) { return __byte_perm(a, b, selector); }
FN u32 funnel(u32 low, u32 high, u32 shift) { return __funnelshift_r(low, high, shift); }
FN u32 mask_or(u32 v, u32 mask, u32 bits) {  // (v & mask) | bits in one instruction
  u32 r;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(r) : "r"(v), "r"(mask), "r"(bits));
  return r;
}
FN u32 multiply_bf16x2(u32 a, u32 b) {  // a b - 0
  u32 r;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(0x80008000u));
  return r;
}
FN u32 round_bf16(float v) { return __bfloat16_as_ushort(__float2bfloat16_rn(v)); }
FN void four_e4m3(u32 bytes, float (&to)[4]) {  // 8-bit floats of 4 exponent and 3 mantissa bits
#if __CUDA_ARCH__ >= 890
  u32 low, high;
  asm("{.reg .b16 l, h;\n mov.b32 {l, h}, %2;\n cvt.rn.f16x2.e4m3x2 %0, l;\n cvt.rn.f16x2.e4m3x2 %1, h;}"
      : "=r"(low), "=r"(high) : "r"(bytes));
  to[0] = __half2float(__ushort_as_half((u16)low)), to[1] = __half2float(__ushort_as_half((u16)(low >> 16)));
  to[2] = __half2float(__ushort_as_half((u16)high)), to[3] = __half2float(__ushort_as_half((u16)(high >> 16)));
#else
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const u32 b = bytes >> (8 * i);
    to[i] = as_float((b & 0x80u) << 24 | (b & 0x7fu) << 20) * 1.329227995784916e+36f;  // 2^120
  }
#endif
}
FN float half_to_float(u32 bits) { return __half2float(__ushort_as_half((u16)bits)); }
FN float to_float(__nv_bfloat16 v) { return __bfloat162float(v); }
FN float to_float(__half v) { return __half2float(v); }
FN float to_float(float v) { return v; }
FN u32 round_half(float v) { return __half_as_ushort(__float2half_rn(v)); }

// Copies to shared memory that run on by themselves; what is not `here` becomes zeros.
FN u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
FN void copy16(void* to, const void* from, bool here) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
               "r"(here ? 16 : 0) : "memory");
}
FN void copy8(void* to, const void* from, bool here) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(shared_address(to)), "l"(from),
               "r"(here ? 8 : 0) : "memory");
}
FN void copy4(void* to, const void* from, bool here) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(to)), "l"(from),
               "r"(here ? 4 : 0) : "memory");
}
FN void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N>
FN void wait_copies() {  // all but the latest N groups of this thread are there
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}
// Sixteen bytes of shared memory, where they are wanted; else `to` stays as it is. Lanes that read
// nothing cost shared memory nothing. Volatile: it stays between the barriers about it.
FN void read16_if(bool wanted, const void* from, uint4& to) {
  asm volatile("{.reg .pred p;\n setp.ne.u32 p, %5, 0;\n @p ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];}"
               : "+r"(to.x), "+r"(to.y), "+r"(to.z), "+r"(to.w)
               : "r"(shared_address(from)), "r"(u32(wanted)));
}
#define DYNAMIC_SHARED(name) extern __shared__ __align__(128) u8 name[]
FN uint4 load16(const void* p) { return __ldg((const uint4*)p); }
FN uint2 load8(const void* p) { return __ldg((const uint2*)p); }
FN u32 load4(const void* p) { return __ldg((const u32*)p); }
FN u32 load2(const void* p) { return __ldg((const u16*)p); }
FN u32 load1(const void* p) { return __ldg((const u8*)p); }
// Blocks of one launch hand each other words, each of which says whether it is there: before, it is
// all ones. Nothing else orders them. Of two places one is used and the other made ready, by turns;
// a ticket says which: every block takes one a launch, so all of a launch get the same quotient.
#define ABSENT 0xffffffffu
FN u64 ticket(const void* counter) {
  return atomicAdd((u64*)counter, 1ull);
}
FN void hand_over(void* p, u32 v) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(min(v, ABSENT - 1u)) : "memory");
}
FN uint4 load16_handed(const void* p) {
  uint4 v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}
FN bool warp_all(bool v) { return __all_sync(0xffffffffu, v); }
FN void patience(u32 turn, u64& begun) {  // a fault after two seconds, rather than waiting for ever
  if ((turn & 1023u) != 1023u) return;
  u64 now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  if (begun == 0) begun = now;
  if (now - begun > 2000000000ull) __trap();
}
FN void prefetch_l2(const void* p, u32 bytes) {  // both multiples of 16
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(p), "r"(bytes) : "memory");
#endif
}
// D += A B for a 16 x 16 tile of bfloat16 by a 16 x 8 one, products and sums in float32.
FN void mma(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// D += A B for a 16 x 32 tile of unsigned bytes by a 32 x 8 one of signed ones.
FN void mma(int (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm(
      "mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
