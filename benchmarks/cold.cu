// 192 KiB of straight text, more than the instruction caches hold: what runs after it begins cold, as in a
// model, where other kernels come between.
#define FOUR(a) a a a a
#define SIXTEEN(a) FOUR(FOUR(a))
#define STEP asm volatile("fma.rn.f32 %0, %0, %2, %3;\n fma.rn.f32 %1, %1, %2, %3;" : "+f"(a), "+f"(b) : "f"(c), "f"(d));
extern "C" __global__ void kernel(float* p, float c, float d) {
  float a = c, b = d;
  SIXTEEN(SIXTEEN(FOUR(STEP STEP STEP STEP STEP STEP)))
  if (a + b == 1e30f) *p = a;
}
