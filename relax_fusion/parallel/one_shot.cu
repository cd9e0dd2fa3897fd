/* An all-reduce of few bytes between the GPUs of one machine, in one kernel and one exchange.

Each worker copies what it sends to memory that its peers can read, announces that to them, waits
for what they announce, and adds what all of them sent, in their order: all have the same sum.

The memory of a worker begins with a word for each block and peer, which that peer writes, and a
count of its calls for each block.  Behind them are two areas for what is sent, which calls take in
turn: who is two calls ahead of a worker has seen that announce the call between, and so it has read
the area.  A block is done with the same elements in every call, as its grid is always the same. */

#ifndef EMULATED
__device__ __forceinline__ void announce(unsigned* word, unsigned value) {
  __threadfence_system();
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

__device__ __forceinline__ unsigned announced(const unsigned* word) {
  unsigned value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}

__device__ __forceinline__ uint4 sent_by(const uint4* at) {
  uint4 v;
  asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(at)
               : "memory");
  return v;
}

__device__ __forceinline__ float number(unsigned bits) {
#ifdef BFLOAT16
  return __uint_as_float(bits << 16);
#else
  float value;
  asm("{.reg .b16 h; cvt.u16.u32 h, %1; cvt.f32.f16 %0, h;}" : "=f"(value) : "r"(bits));
  return value;
#endif
}

__device__ __forceinline__ unsigned bits_of(float value) {
  unsigned bits;
#ifdef BFLOAT16
  asm("{.reg .b16 h; cvt.rn.bf16.f32 h, %1; cvt.u32.u16 %0, h;}" : "=r"(bits) : "f"(value));
#else
  asm("{.reg .b16 h; cvt.rn.f16.f32 h, %1; cvt.u32.u16 %0, h;}" : "=r"(bits) : "f"(value));
#endif
  return bits;
}
#endif

struct Workers {
  char* at[MOST_WORKERS];
};

extern "C" __global__ void one_shot_all_reduce(const uint4* send, uint4* received, Workers workers,
                                               int rank, int count, long long vectors,
                                               long long capacity) {
  unsigned* words = (unsigned*)workers.at[rank] + blockIdx.x * MOST_WORKERS;
  unsigned* calls = (unsigned*)workers.at[rank] + gridDim.x * MOST_WORKERS + blockIdx.x;
  const unsigned call = *(volatile unsigned*)calls + 1;
  const long long area = AREAS + (call & 1) * capacity;
  const long long first = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  const long long step = (long long)gridDim.x * blockDim.x;
  uint4* mine = (uint4*)(workers.at[rank] + area);
  for (long long i = first; i < vectors; i += step) mine[i] = send[i];
  __syncthreads();
  for (int peer = threadIdx.x; peer < count; peer += blockDim.x)
    announce((unsigned*)workers.at[peer] + blockIdx.x * MOST_WORKERS + rank, call);
  for (int peer = threadIdx.x; peer < count; peer += blockDim.x)
    while ((int)(announced(words + peer) - call) < 0) {
    }
  __syncthreads();
  if (threadIdx.x == 0) *calls = call;
  for (long long i = first; i < vectors; i += step) {
    float sums[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    for (int peer = 0; peer < count; ++peer) {
      const uint4 v = sent_by((const uint4*)(workers.at[peer] + area) + i);
      const unsigned pairs[4] = {v.x, v.y, v.z, v.w};
      for (int k = 0; k < 8; ++k) sums[k] += number(pairs[k / 2] >> (k % 2 * 16) & 0xffff);
    }
    unsigned pairs[4];
    for (int k = 0; k < 4; ++k)
      pairs[k] = bits_of(sums[2 * k]) | bits_of(sums[2 * k + 1]) << 16;
    received[i] = uint4{pairs[0], pairs[1], pairs[2], pairs[3]};
  }
}
