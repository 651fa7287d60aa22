// The few things of Metal that the kernels use. shim/metal.h has the language's names for a CPU.
typedef uint u32;
typedef ulong u64;
typedef ushort u16;
typedef uchar u8;
#define FN inline
#define EXP metal::precise::exp
#define LOG metal::precise::log
#define SQRT metal::precise::sqrt

FN float as_float(u32 v) { return as_type<float>(v); }
FN u32 as_bits(float v) { return as_type<u32>(v); }
FN float fast_exp(float v) { return metal::fast::exp(v); }
FN float LOG1P(float x) {
  const float y = 1.f + x;
  return y == 1.f ? x : x * (LOG(y) / (y - 1.f));
}
FN float shuffle(float v, int lane) { return simd_shuffle(v, ushort(lane)); }
FN u32 warp_max(u32 v) { return simd_max(v); }
FN u32 warp_min(u32 v) { return simd_min(v); }
FN void warp_barrier() { simdgroup_barrier(mem_flags::mem_threadgroup); }
FN u32 round_bf16(float v) {  // to nearest, ties to even
  const u32 b = as_bits(v);
  return (b + 0x7fffu + ((b >> 16) & 1u)) >> 16;
}
FN float half_to_float(u32 bits) { return float(as_type<half>(u16(bits))); }
FN u32 round_half(float v) { return as_type<u16>(half(v)); }
FN float to_float(bfloat16_t v) { return float(v); }
FN float to_float(half v) { return float(v); }
FN float to_float(float v) { return v; }
#if TYPE == 1
FN float load_x(device const u16* p, int i) { return as_float(u32(p[i]) << 16); }
FN u16 from_float(float v) { return u16(round_bf16(v)); }
#else
FN float load_x(device const u16* p, int i) { return half_to_float(p[i]); }
FN u16 from_float(float v) { return u16(round_half(v)); }
#endif
