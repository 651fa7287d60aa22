// The Metal language's names, as far as the kernels use them, for a CPU.
#pragma once
#include "lanes.h"
#define TG
#define PRIVATE
#define LANE lanes::lane()
typedef unsigned char uchar;
typedef _Float16 half;
struct bfloat16_t {
  ushort bits;
  operator float() const { return lanes::bits_float((uint)bits << 16); }
};
struct Position { uint x; };
inline Position thread_position() { return {(uint)lanes::thread()}; }
#define thread_position_in_threadgroup thread_position()
inline Position group_position() { return {(uint)lanes::block.index}; }
#define threadgroup_position_in_grid group_position()
#define simdgroup_index_in_threadgroup simdgroup_index()
inline int simdgroup_index() { return lanes::thread() / lanes::WARP; }
enum class mem_flags { mem_threadgroup };
inline void threadgroup_barrier(mem_flags) { lanes::meet(lanes::block.all, lanes::block.threads); }
inline void simdgroup_barrier(mem_flags) { lanes::shuffle(0u, 0); }
template <class T> inline T simd_shuffle(T v, ushort lane) { return lanes::shuffle(v, lane); }
template <class T> inline T simd_sum(T v) { return lanes::fold(v, [](T a, T b) { return a + b; }); }
template <class T> inline T simd_max(T v) { return lanes::fold(v, [](T a, T b) { return a < b ? b : a; }); }
template <class T> inline T simd_min(T v) { return lanes::fold(v, [](T a, T b) { return a < b ? a : b; }); }
template <class T, class S> inline T as_type(S v) {
  static_assert(sizeof(T) == sizeof(S), "as_type keeps the size");
  T r;
  memcpy(&r, &v, sizeof r);
  return r;
}
template <class T> inline T min(T a, T b) { return b < a ? b : a; }
template <class T> inline T max(T a, T b) { return a < b ? b : a; }
namespace metal {
namespace precise {
inline float exp(float v) { return expf(v); }
inline float log(float v) { return logf(v); }
inline float sqrt(float v) { return sqrtf(v); }
}  // namespace precise
namespace fast {
inline float exp(float v) { return expf(v); }
}  // namespace fast
}  // namespace metal
#define fabs fabsf
// Last: what follows is the kernels' text alone.
#define device
#define constant
#define thread
#define threadgroup static thread_local
