// prelude.cuh's names for a CPU; mma does what the tensor cores' m16n8k16 does, lane by lane.
#pragma once
#include "lanes.h"
typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;
typedef unsigned char u8;
#define FN inline
#define TG
#define PRIVATE
#define __shared__ static thread_local
#define __syncthreads() lanes::meet(lanes::block.all, lanes::block.threads)
struct Place { int x; };
#define threadIdx Place{lanes::thread()}
#define blockIdx Place{lanes::block.index}
#define gridDim Place{lanes::block.blocks}
struct alignas(16) uint4 { u32 x, y, z, w; };
struct alignas(8) uint2 { u32 x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) float2 { float x, y; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
struct __nv_bfloat16 { u16 bits; };
struct __half { u16 bits; };
#define fabs fabsf
template <class T> inline T min(T a, T b) { return b < a ? b : a; }
template <class T> inline T max(T a, T b) { return a < b ? b : a; }

inline int lane_id() { return lanes::lane(); }
inline float as_float(u32 v) { return lanes::bits_float(v); }
inline u32 as_bits(float v) { return lanes::float_bits(v); }
inline float fast_exp(float v) { return expf(v); }
inline float shuffle(float v, int lane) { return lanes::shuffle(v, lane); }
inline u32 shuffle(u32 v, int lane) { return lanes::shuffle(v, lane); }
inline float shuffle_xor(float v, int mask) { return lanes::shuffle(v, lanes::lane() ^ mask); }
inline u32 warp_max(u32 v) { return lanes::fold(v, [](u32 a, u32 b) { return a < b ? b : a; }); }
inline u32 warp_min(u32 v) { return lanes::fold(v, [](u32 a, u32 b) { return a < b ? a : b; }); }
inline void warp_barrier() { lanes::shuffle(0u, 0); }
inline void group_barrier(int id, int count) { lanes::meet(lanes::block.named[id], count); }
inline void group_arrive(int id, int count) { lanes::arrive(lanes::block.named[id], count); }
inline void held_here(u32&) {}
inline u32 permute(u32 a, u32 b, u32 selector) {
  const u64 both = (u64)b << 32 | a;
  u32 r = 0;
  for (int i = 0; i < 4; ++i) r |= (u32)((both >> (8 * ((selector >> (4 * i)) & 7))) & 255) << (8 * i);
  return r;
}
inline u32 funnel(u32 low, u32 high, u32 shift) { return (u32)(((u64)high << 32 | low) >> shift); }
inline u32 mask_or(u32 v, u32 mask, u32 bits) { return (v & mask) | bits; }
inline u32 round_bf16(float v) { return lanes::to_bf16(v); }
inline u32 multiply_bf16x2(u32 a, u32 b) {
  return round_bf16(as_float(a << 16) * as_float(b << 16)) |
         round_bf16(as_float(a & 0xffff0000u) * as_float(b & 0xffff0000u)) << 16;
}
inline void four_e4m3(u32 bytes, float (&to)[4]) {
  for (int i = 0; i < 4; ++i) {
    const u32 b = bytes >> (8 * i);
    to[i] = as_float((b & 0x80u) << 24 | (b & 0x7fu) << 20) * 1.329227995784916e+36f;
  }
}
inline float half_to_float(u32 bits) { return lanes::from_half(bits); }
inline u32 round_half(float v) { return lanes::to_half(v); }
inline float to_float(__nv_bfloat16 v) { return as_float((u32)v.bits << 16); }
inline float to_float(__half v) { return half_to_float(v.bits); }
inline float to_float(float v) { return v; }
// Where a call of these stands: what is misaligned is reported there.
#define HERE const char *file = __builtin_FILE(), int line = __builtin_LINE()
template <class T> inline T read(const void* p, const char* file, int line) {
  lanes::aligned(p, sizeof(T), "a load", file, line);
  T v;
  memcpy(&v, p, sizeof v);
  return v;
}
inline uint4 load16(const void* p, HERE) { return read<uint4>(p, file, line); }
inline uint2 load8(const void* p, HERE) { return read<uint2>(p, file, line); }
inline u32 load4(const void* p, HERE) { return read<u32>(p, file, line); }
inline u32 load2(const void* p, HERE) { return read<u16>(p, file, line); }
inline u32 load1(const void* p, HERE) { return read<u8>(p, file, line); }
inline void read16_if(bool wanted, const void* from, uint4& to, HERE) {
  if (wanted) to = read<uint4>(from, file, line);
}
inline void copy16(void* to, const void* from, bool here, HERE) { lanes::copy(to, from, 16, here, file, line); }
inline void copy8(void* to, const void* from, bool here, HERE) { lanes::copy(to, from, 8, here, file, line); }
inline void copy4(void* to, const void* from, bool here, HERE) { lanes::copy(to, from, 4, here, file, line); }
inline void commit_copies() { lanes::commit_copies(); }
template <int N> inline void wait_copies() { lanes::wait_copies(N); }
#define DYNAMIC_SHARED(name) alignas(128) static thread_local u8 name[232448]
#define ABSENT 0xffffffffu
inline void hand_over(void* p, u32 v, HERE) {
  lanes::aligned(p, 4, "a store", file, line);
  lanes::hand_over(p, v);
}
inline u64 ticket(const void* p, HERE) {
  lanes::aligned(p, 8, "a counter", file, line);
  return lanes::ticket(p);
}
inline uint4 load16_handed(const void* p, HERE) {
  lanes::aligned(p, 16, "a load", file, line);
  const u32* w = (const u32*)p;
  return {lanes::handed(w), lanes::handed(w + 1), lanes::handed(w + 2), lanes::handed(w + 3)};
}
inline bool warp_all(bool v) { return warp_min(v) != 0; }
inline void patience(u32 turn, u64&) { lanes::patience(turn); }
inline void prefetch_l2(const void* p, u32 bytes, HERE) {
  lanes::aligned(p, 16, "a prefetch", file, line);
  lanes::aligned((const void*)(uintptr_t)bytes, 16, "a prefetch's size", file, line);
}
inline void mma(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  const u32 given[6] = {a0, a1, a2, a3, b0, b1};
  const auto all = lanes::show(given, 6);
  const int lane = lanes::lane(), g = lane >> 2, q = lane & 3;
  const auto half = [](u32 v, int upper) { return lanes::bits_float(upper ? v & 0xffff0000u : v << 16); };
  for (int c = 0; c < 4; ++c) {
    const int row = g + 8 * (c >> 1), column = 2 * q + (c & 1);
    for (int k = 0; k < 16; ++k) {
      const int from = (k & 7) >> 1, upper = k & 1, second = k >> 3;
      const float a = half(all[(row & 7) * 4 + from][2 * second + (row >> 3)], upper);
      const float b = half(all[column * 4 + from][4 + second], upper);
      d[c] += a * b;
    }
  }
}
inline void mma(int (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  const u32 given[6] = {a0, a1, a2, a3, b0, b1};
  const auto all = lanes::show(given, 6);
  const int lane = lanes::lane(), g = lane >> 2, q = lane & 3;
  for (int c = 0; c < 4; ++c) {
    const int row = g + 8 * (c >> 1), column = 2 * q + (c & 1);
    for (int k = 0; k < 32; ++k) {
      const int from = (k & 15) >> 2, shift = 8 * (k & 3), second = k >> 4;
      const int a = u8(all[(row & 7) * 4 + from][2 * second + (row >> 3)] >> shift);
      d[c] += a * int((signed char)(all[column * 4 + from][4 + second] >> shift));
    }
  }
}
