// Types, loads, conversions and activations of the kernels; values are float32, sums of integers int32.

typedef unsigned long long u64;
typedef unsigned int u32;
typedef unsigned short u16;

struct alignas(64) TensorMap {
  u64 opaque[16];
};

__device__ __forceinline__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

__device__ __forceinline__ float number(u16 bits) {
  float value;
  asm("cvt.f32." DTYPE " %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}

__device__ __forceinline__ float number(float value) { return value; }

__device__ __forceinline__ u32 bits_of(Value value) { return reinterpret_cast<const u32&>(value); }

__device__ __forceinline__ u32 pack(float low, float high) {
  u32 both;
  asm("cvt.rn." DTYPE "x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}

__device__ __forceinline__ void unpack(u32 both, float& low, float& high) {
  low = number((u16)both);
  high = number((u16)(both >> 16));
}

// Load words, 16 or 8 bytes at once where they are as many, from a multiple of that.
template <int COUNT>
__device__ __forceinline__ void load_words(const void* from, u32 (&to)[COUNT]) {
  constexpr int at_once = COUNT % 4 == 0 ? 4 : COUNT % 2 == 0 ? 2 : 1;
  #pragma unroll
  for (int i = 0; i < COUNT; i += at_once) {
    if constexpr (at_once == 4) {
      const uint4 four = ((const uint4*)from)[i / 4];
      to[i] = four.x, to[i + 1] = four.y, to[i + 2] = four.z, to[i + 3] = four.w;
    } else if constexpr (at_once == 2) {
      const uint2 two = ((const uint2*)from)[i / 2];
      to[i] = two.x, to[i + 1] = two.y;
    } else {
      to[i] = ((const u32*)from)[i];
    }
  }
}

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

__device__ __forceinline__ float silu(float x) { return x * sigmoid(x); }

// x * Phi(x): for a >= 0, Phi(-a) is exp(-a * a / 2) times a polynomial of 1 / (1 + 0.295 a)
__device__ __forceinline__ float gelu(float x) {
  const float size = fabsf(x), t = 1.0f / (1.0f + 0.295f * size);
  float tail = 0.039421144872903824f * t - 0.18340614438056946f;
  tail = tail * t + 0.27101653814315796f;
  tail = tail * t - 0.11707103252410889f;
  tail = tail * t + 0.16628892719745636f;
  tail = tail * t + 0.08474482595920563f;
  tail = tail * t + 0.12169938534498215f;
  tail = tail * t + 0.11728934198617935f;
  tail = tail * t + 1.7006907000904903e-05f;
  tail *= exp2f((-0.7213475204444817f * size) * size);
  return x * (x < 0.0f ? tail : 1.0f - tail);
}

__device__ __forceinline__ float gelu_tanh(float x) {
  return x * sigmoid(1.5957691216057308f * (x + 0.044715f * x * x * x));
}

__device__ __forceinline__ float quick_gelu(float x) { return x * sigmoid(1.702f * x); }

__device__ __forceinline__ float relu(float x) { return x < 0.0f ? 0.0f : x; }

__device__ __forceinline__ float relu2(float x) { return relu(x) * relu(x); }

// Not tanhf, which fast maths makes an instruction of eleven bits; near 0 a polynomial
__device__ __forceinline__ float hyperbolic_tangent(float x) {
  const float size = fabsf(x), square = x * x;
  float near = square * 0.0172569385f - 0.0530529242f;
  near = x + x * square * ((near * square + 0.133259869f) * square - 0.333331484f);
  const float far = 2.0f * sigmoid(2.0f * size) - 1.0f;
  return size < 0.5f ? near : (x < 0.0f ? -far : far);
}
