// gate and up of one row to the activation, in float32.
#define ACT_SWIGLU 0
#define ACT_SWIGLU_CLAMPED 1
#define ACT_GEGLU 2
#define ACT_SWIGLU_OAI 3
#define ACT_RELU2 4
template <int KIND>
FN float activate(float gate, float up, float limit, float alpha) {
  if (KIND == ACT_RELU2) {
    const float v = max(up, 0.f);
    return v * v;
  }
  if (KIND == ACT_GEGLU) {  // tanh form: x / (1 + exp(-2 z)), z = sqrt(2 / pi) (x + 0.044715 x^3)
    const float z = 0.7978845608028654f * (gate + 0.044715f * gate * gate * gate);
    return gate / (1.f + EXP(-2.f * z)) * up;
  }
  if (KIND == ACT_SWIGLU_OAI) {
    const float g = min(gate, limit), u = min(max(up, -limit), limit);
    return (u + 1.f) * (g / (1.f + EXP(-alpha * g)));
  }
  float g = gate, u = up;
  if (KIND == ACT_SWIGLU_CLAMPED) {
    g = min(g, limit);
    u = min(max(u, -limit), limit);
  }
  return g / (1.f + EXP(-g)) * u;
}
