// How 32 weights (a chunk) lie in memory and become bfloat16 pairs, exactly.
// octet(w, i, p): the weights 8i to 8i+7 as four registers (0,4) (1,5) (2,6) (3,7), low half first;
// every format gives this one order, so gate and up may differ in format, and the operand is laid
// out once to match. OFFSET is what a pair holds beside the weight's own integer; UNDO, by what sums of
// pairs are multiplied in the end. Small floats stay where their bits fall, at the bottom of
// bfloat16's range, some of them subnormal; products with an operand LIFTed by 2^80 are in float32's
// middle, exact as ever. So where such weights are among an operand's, it has to be below 2^47.
#define LIFTED 1.2089258196146292e+24f  // 2^80
#define BF16_LIFTED 0x67806780u
#define BF16_128 0x43004300u  // 128.0 twice: its seven mantissa bits take an integer up to 127

FN float scale_bf16(u32 bits) { return as_float(bits << 16); }
// A byte that is shifted to where a float's exponent is; 0: 2^-127.
FN float scale_e8m0(u32 shifted) { return as_float(max(shifted & 0x7f800000u, 0x00400000u)); }
FN float scale_e4m3(u32 b) {
  return as_float(((b & 0x80u) << 24) | ((b & 0x7fu) << 20)) * 1.329227995784916e+36f;  // 2^120
}

struct Affine4 {
  static constexpr int WORDS = 4;
  static constexpr float OFFSET = 128.f, UNDO = 1.f;
  static FN void octet(const u32 (&w)[4], int i, u32 (&p)[4]) {
    const u32 v = w[i];
    p[0] = mask_or(v, 0x000f000fu, BF16_128);
    p[1] = mask_or(v >> 4, 0x000f000fu, BF16_128);
    p[2] = mask_or(v >> 8, 0x000f000fu, BF16_128);
    p[3] = mask_or(v >> 12, 0x000f000fu, BF16_128);
  }
};

struct Affine6 {  // a stream of bits, low first: 8 weights in 6 bytes
  static constexpr int WORDS = 6;
  static constexpr float OFFSET = 128.f, UNDO = 1.f;
  static FN void octet(const u32 (&w)[6], int i, u32 (&p)[4]) {
    const int j = (i >> 1) * 3;
    u32 low, high;  // weights 0..3 and 4..7, 24 bits each
    if (i & 1) {
      low = funnel(w[j + 1], w[j + 2], 16);
      high = w[j + 2] >> 8;
    } else {
      low = w[j];
      high = funnel(w[j], w[j + 1], 24);
    }
    const u32 first = permute(low, high, 0x5410), second = permute(low >> 12, high >> 12, 0x5410);
    p[0] = mask_or(first, 0x003f003fu, BF16_128);
    p[1] = mask_or(first >> 6, 0x003f003fu, BF16_128);
    p[2] = mask_or(second, 0x003f003fu, BF16_128);
    p[3] = mask_or(second >> 6, 0x003f003fu, BF16_128);
  }
};

struct Affine8 {  // 2^23 + q as float32, minus 2^23: the upper half is q as bfloat16, exact to 255
  static constexpr int WORDS = 8;
  static constexpr float OFFSET = 0.f, UNDO = 1.f;
  static FN u32 pair(u32 a, u32 b, u32 selector) {
    const float x = as_float(permute(a, 0x4b000000u, selector)) - 8388608.f;
    const float y = as_float(permute(b, 0x4b000000u, selector)) - 8388608.f;
    return permute(as_bits(x), as_bits(y), 0x7632);
  }
  static FN void octet(const u32 (&w)[8], int i, u32 (&p)[4]) {
    p[0] = pair(w[2 * i], w[2 * i + 1], 0x7650);
    p[1] = pair(w[2 * i], w[2 * i + 1], 0x7651);
    p[2] = pair(w[2 * i], w[2 * i + 1], 0x7652);
    p[3] = pair(w[2 * i], w[2 * i + 1], 0x7653);
  }
};

struct E2M1 {  // sign to bit 15, exponent and mantissa to bits 8..6: the value times 2^-126
  static constexpr int WORDS = 4;
  static constexpr float OFFSET = 0.f, UNDO = 8.507059173023462e+37f;
  static FN u32 spread(u32 nibbles, u32 factor) {
    return (nibbles * factor) & 0x81c081c0u;
  }
  static FN void octet(const u32 (&w)[4], int i, u32 (&p)[4]) {
    const u32 v = w[i], h = v >> 8;
    p[0] = spread(v & 0x000f000fu, 0x1040u);
    p[1] = spread(v & 0x00f000f0u, 0x0104u);
    p[2] = spread(h & 0x000f000fu, 0x1040u);
    p[3] = spread(h & 0x00f000f0u, 0x0104u);
  }
};

struct E4M3 {  // sign to bit 15, the rest to bits 10..4: the value times 2^-120
  static constexpr int WORDS = 8;
  static constexpr float OFFSET = 0.f, UNDO = 1.329227995784916e+36f;
  static FN u32 spread(u32 upper, u32 shifted) {
    return mask_or(upper, 0x80008000u, shifted & 0x07f007f0u);
  }
  static FN void octet(const u32 (&w)[8], int i, u32 (&p)[4]) {
    const u32 first = permute(w[2 * i], w[2 * i + 1], 0x5410);  // bytes 0 1 low, 4 5 high
    const u32 second = permute(w[2 * i], w[2 * i + 1], 0x7632);
    p[0] = spread(first << 8, first << 4);
    p[1] = spread(first, first >> 4);
    p[2] = spread(second << 8, second << 4);
    p[3] = spread(second, second >> 4);
  }
};

struct Dense16 {  // bfloat16 as it is
  static constexpr int WORDS = 16;
  static constexpr float OFFSET = 0.f, UNDO = 1.f;
  static FN void octet(const u32 (&w)[16], int i, u32 (&p)[4]) {
    p[0] = permute(w[4 * i], w[4 * i + 2], 0x5410);
    p[1] = permute(w[4 * i], w[4 * i + 2], 0x7632);
    p[2] = permute(w[4 * i + 1], w[4 * i + 3], 0x5410);
    p[3] = permute(w[4 * i + 1], w[4 * i + 3], 0x7632);
  }
};
