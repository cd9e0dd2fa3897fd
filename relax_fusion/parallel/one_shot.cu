/* An all-reduce of few bytes between the GPUs of one machine, in one kernel and one way.

Each worker writes what it sends to memory of every other one, and adds what all of them sent, in
their order: all have the same sum.  Every second word that is written is the number of the call, so
that data have come when this has: nobody waits for anything else, and there is no fence.

The memory of a worker begins with a count of its calls for each block, for all of them count every
call.  Behind are two areas, which calls take in turn, with room for each worker.  Who writes for a
call has received all that belongs to the call before, whose senders had by then read what they got
in the one before that: nothing is overwritten that is still to be read. */

#ifndef EMULATED
__device__ __forceinline__ void push(uint4* at, uint4 v) {
  asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w)
               : "memory");
}

__device__ __forceinline__ uint4 pushed(const uint4* at) {
  uint4 v;
  asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(at)
               : "memory");
  return v;
}

/* The next kernel may begin, and do what it does before it waits for this one. */
__device__ __forceinline__ void begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;");
#endif
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

extern "C" __global__ void one_shot_all_reduce(const uint2* send, uint2* received, Workers workers,
                                               int rank, int count, long long pairs,
                                               long long most_pairs) {
  begin();
  volatile unsigned* calls = (unsigned*)workers.at[rank] + blockIdx.x;
  const unsigned call = *calls + 1;
  const long long area = (call & 1) * count * most_pairs;
  const long long first = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  const long long step = (long long)gridDim.x * blockDim.x;
  for (long long i = first; i < pairs; i += step) {
    const uint2 v = send[i];
    for (int peer = 0; peer < count; ++peer)
      if (peer != rank)
        push((uint4*)(workers.at[peer] + AREAS) + area + rank * most_pairs + i,
             uint4{v.x, call, v.y, call});
  }
  const uint4* mine = (const uint4*)(workers.at[rank] + AREAS) + area;
  for (long long i = first; i < pairs; i += step) {
    float sums[4] = {0, 0, 0, 0};
    for (int peer = 0; peer < count; ++peer) {
      uint2 v = send[i];
      if (peer != rank) {
        uint4 come;
        do {
          come = pushed(mine + peer * most_pairs + i);
        } while (come.y != call || come.w != call);
        v = uint2{come.x, come.z};
      }
      sums[0] += number(v.x & 0xffff);
      sums[1] += number(v.x >> 16);
      sums[2] += number(v.y & 0xffff);
      sums[3] += number(v.y >> 16);
    }
    received[i] = uint2{bits_of(sums[0]) | bits_of(sums[1]) << 16,
                        bits_of(sums[2]) | bits_of(sums[3]) << 16};
  }
  __syncthreads();
  if (threadIdx.x == 0) *calls = call;
}
