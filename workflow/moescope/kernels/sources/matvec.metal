// One lane's sixteen weights of a row times sixteen of the vector. CODE: 0 affine integers,
// 1 e2m1, 2 e4m3, 3 bfloat16. SCALE: 0 none, 1 bfloat16, 2 half, 3 e8m0, 4 e4m3.
// No subnormal float32 on the way: the hardware may take it for zero.
FN float e4m3(u32 b) {
  const u32 v = b & 0x7fu;
  const float m = v < 8u ? float(v) * 0.001953125f : as_float((v << 20) + (120u << 23));
  return b & 0x80u ? -m : m;
}
FN float e8m0(u32 b) { return as_float(b ? b << 23 : 0x00400000u); }
FN float e2m1(u32 n) {
  const u32 v = n & 7u;
  const float m = v < 2u ? float(v) * 0.5f : as_float((v << 22) + (126u << 23));
  return n & 8u ? -m : m;
}

template <int SCALE>
FN float scale_at(device const u8* p, u32 i) {
  if (SCALE == 1) return as_float(u32(((device const u16*)p)[i]) << 16);
  if (SCALE == 2) return half_to_float(((device const u16*)p)[i]);
  if (SCALE == 3) return e8m0(p[i]);
  if (SCALE == 4) return e4m3(p[i]);
  return 1.f;
}

template <int CODE, int BITS>
FN float dot16(device const u8* p, thread const float* x) {
  device const u32* w = (device const u32*)p;
  float sum = 0.f;
  if (CODE == 3) {
    for (int i = 0; i < 8; ++i) {
      sum += as_float(w[i] << 16) * x[2 * i];
      sum += as_float(w[i] & 0xffff0000u) * x[2 * i + 1];
    }
  } else if (BITS == 8) {
    for (int i = 0; i < 4; ++i) {
      for (int j = 0; j < 4; ++j) {
        const u32 q = (w[i] >> (8 * j)) & 255u;
        sum += (CODE == 2 ? e4m3(q) : float(q)) * x[4 * i + j];
      }
    }
  } else if (BITS == 6) {
    for (int i = 0; i < 4; ++i) {  // four weights in three bytes
      const u32 q = u32(p[3 * i]) | u32(p[3 * i + 1]) << 8 | u32(p[3 * i + 2]) << 16;
      for (int j = 0; j < 4; ++j) sum += float((q >> (6 * j)) & 63u) * x[4 * i + j];
    }
  } else {
    for (int i = 0; i < 2; ++i) {
      for (int j = 0; j < 8; ++j) {
        const u32 q = (w[i] >> (4 * j)) & 15u;
        sum += (CODE == 1 ? e2m1(q) : float(q)) * x[8 * i + j];
      }
    }
  }
  return sum;
}

// Row `row` of D weights times the vector, this lane's share.
template <int CODE, int BITS, int GROUP, int SCALE, int D>
FN float row_share(device const u8* w, device const u8* s, device const u8* b, u64 row, int unit,
                   thread const float* x, float sum) {
  const u32 group = u32(unit) * 16u / u32(GROUP);
  const u64 first = row * u64(D / GROUP);
  const u64 each = SCALE <= 2 ? 2 : 1;
  const float v = dot16<CODE, BITS>(w + row * u64(D / 8 * BITS) + u64(unit) * (2 * BITS), x);
  float y = scale_at<SCALE>(s + first * each, group) * v;
  if (CODE == 0) y += scale_at<SCALE>(b + first * each, group) * sum;
  return y;
}
