/* All-reduces between the GPUs of one machine, by memory of each that all others write to.

Two kernels.  Few bytes go one way: each worker writes what it sends to every other one, and adds
what all of them sent.  Many bytes go two ways: each worker adds what all of them sent of its part,
and writes that sum to every other one.  All add in the order of the workers, so that all have the
same sum, whichever kernel computed it.

The memory of a kernel begins with a count of calls for each block, for all workers count every
call.  Blocks wait for blocks of other GPUs, and of their own for none behind them: they need not
all run at once.

A kernel begins while the one in front is at work, and counts before it waits for that.  Counts are
written before the next kernel may begin, so that one finds them if it counts as well. */

#ifndef EMULATED
#define FUNCTION __device__ __forceinline__

FUNCTION void push(uint4* at, uint4 v) {
  asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w)
               : "memory");
}

FUNCTION uint4 pushed(const uint4* at) {
  uint4 v;
  asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(at)
               : "memory");
  return v;
}

/* Who sees the flag sees what this block wrote before it synchronised. */
FUNCTION void raise(unsigned* flag, unsigned call) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(flag), "r"(call) : "memory");
}

FUNCTION bool is_raised(const unsigned* flag, unsigned call) {
  unsigned found;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(found) : "l"(flag) : "memory");
  return found == call;
}

/* Wait for the kernels in front; then the next one may begin. */
FUNCTION void wait_for_those_in_front() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

FUNCTION float number(unsigned bits) {
#ifdef BFLOAT16
  return __uint_as_float(bits << 16);
#else
  float value;
  asm("{.reg .b16 h; cvt.u16.u32 h, %1; cvt.f32.f16 %0, h;}" : "=f"(value) : "r"(bits));
  return value;
#endif
}

FUNCTION unsigned bits_of(float value) {
  unsigned bits;
#ifdef BFLOAT16
  asm("{.reg .b16 h; cvt.rn.bf16.f32 h, %1; cvt.u32.u16 %0, h;}" : "=r"(bits) : "f"(value));
#else
  asm("{.reg .b16 h; cvt.rn.f16.f32 h, %1; cvt.u32.u16 %0, h;}" : "=r"(bits) : "f"(value));
#endif
  return bits;
}
#endif

/* Numbers are in words of two. */
FUNCTION void add(float* sums, unsigned word) {
  sums[0] += number(word & 0xffff);
  sums[1] += number(word >> 16);
}

FUNCTION unsigned word_of(const float* sums) {
  return bits_of(sums[0]) | bits_of(sums[1]) << 16;
}

struct Workers {
  char* at[MOST_WORKERS];
};

/* Return the number of this call, which all threads of a block ask for. */
FUNCTION unsigned count_call(char* memory) {
  volatile unsigned* calls = (unsigned*)memory + blockIdx.x;
  const unsigned call = *calls + 1;
  __syncthreads();
  if (threadIdx.x == 0) {
    *calls = call;
    __threadfence();
  }
  __syncthreads();
  return call;
}

/* Few bytes: every second word that is written is the number of the call, so that data have come
when this has.  Nobody waits for anything else, and there is no fence.

There are two areas, which calls take in turn, with room for what each worker sends.  Who writes for
a call has received all that belongs to the call before, whose senders had by then read what they
got in the one before that: nothing is overwritten that is still to be read. */
extern "C" __global__ void one_shot_all_reduce(const uint2* send, uint2* received,
                                               const __grid_constant__ Workers workers, int rank,
                                               int count, long long pairs, long long most_pairs) {
  const unsigned call = count_call(workers.at[rank]);
  const long long area = (call & 1) * count * most_pairs;
  const long long first = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  const long long step = (long long)gridDim.x * blockDim.x;
  const long long place = area + rank * most_pairs;
  /* Addresses are translated while the kernel in front is at work: that takes as long as the rest. */
  for (int peer = 0; peer < count; ++peer)
    if (first < pairs) pushed((uint4*)(workers.at[peer] + COUNTS) + place + first);
  wait_for_those_in_front();
  for (long long i = first; i < pairs; i += step) {
    const uint2 own = send[i];
    for (int peer = 0; peer < count; ++peer)
      if (peer != rank)
        push((uint4*)(workers.at[peer] + COUNTS) + place + i, uint4{own.x, call, own.y, call});
  }
  const uint4* mine = (const uint4*)(workers.at[rank] + COUNTS) + area;
  for (long long i = first; i < pairs; i += step) {
    const uint2 own = send[i]; /* on its way while the others' are awaited */
    float sums[4] = {0, 0, 0, 0};
    for (int peer = 0; peer < count; ++peer) {
      uint2 v = own;
      if (peer != rank) {
        uint4 come;
        do {
          come = pushed(mine + peer * most_pairs + i);
        } while (come.y != call || come.w != call);
        v = uint2{come.x, come.z};
      }
      add(sums, v.x);
      add(sums + 2, v.y);
    }
    received[i] = uint2{word_of(sums), word_of(sums + 2)};
  }
}

/* What a worker does in a call: two things are sent, first what is to be added, then sums. */
enum { NUMBERS, SUMS };

struct Exchange {
  const Workers& workers;
  int rank, count;
  unsigned call;
  long long most; /* vectors of a part */

  FUNCTION unsigned* flag(int at, int from, int what, int chunk) const {
    return (unsigned*)(workers.at[at] + COUNTS) + (what * MOST_WORKERS + from) * FLAGS + chunk;
  }

  FUNCTION uint4* room(int at, int from, int what) const {
    const long long rooms = what * (count - 1) + (from - (from > at));
    return (uint4*)(workers.at[at] + COUNTS + 2 * MOST_WORKERS * FLAGS * 4) + rooms * most;
  }

  /* Tell all others that this block has sent a chunk to them. */
  FUNCTION void tell(int what, int chunk) const {
    __syncthreads();
    for (int peer = threadIdx.x; peer < count; peer += blockDim.x)
      if (peer != rank) raise(flag(peer, rank, what, chunk), call);
  }

  FUNCTION void await(int what, int chunk) const {
    for (int peer = threadIdx.x; peer < count; peer += blockDim.x)
      if (peer != rank)
        while (!is_raised(flag(rank, peer, what, chunk), call)) {
        }
    __syncthreads();
  }

  FUNCTION void copy(const uint4* from, uint4* to, long long first, long long end) const {
    for (long long i = first + threadIdx.x; i < end; i += EACH * blockDim.x) {
      uint4 v[EACH];
#pragma unroll
      for (int j = 0; j < EACH; ++j)
        if (i + j * blockDim.x < end) v[j] = pushed(from + i + j * blockDim.x);
#pragma unroll
      for (int j = 0; j < EACH; ++j)
        if (i + j * blockDim.x < end) push(to + i + j * blockDim.x, v[j]);
    }
  }

  /* Add what all have of this worker's part, for this worker and all others. */
  FUNCTION void reduce(const uint4* send, uint4* received, long long first, long long end) const {
    for (long long i = first + threadIdx.x; i < end; i += EACH * blockDim.x) {
      float sums[EACH][8] = {};
      for (int peer = 0; peer < count; ++peer) {
        const uint4* from = (peer == rank ? send : room(rank, peer, NUMBERS)) + i;
        uint4 v[EACH] = {};
#pragma unroll
        for (int j = 0; j < EACH; ++j)
          if (i + j * blockDim.x < end) v[j] = pushed(from + j * blockDim.x);
#pragma unroll
        for (int j = 0; j < EACH; ++j) {
          add(sums[j], v[j].x);
          add(sums[j] + 2, v[j].y);
          add(sums[j] + 4, v[j].z);
          add(sums[j] + 6, v[j].w);
        }
      }
#pragma unroll
      for (int j = 0; j < EACH; ++j) {
        const uint4 v = {word_of(sums[j]), word_of(sums[j] + 2), word_of(sums[j] + 4),
                         word_of(sums[j] + 6)};
        for (int peer = 0; peer < count && i + j * blockDim.x < end; ++peer)
          push((peer == rank ? received : room(peer, rank, SUMS)) + i + j * blockDim.x, v);
      }
    }
  }
};

/* Many bytes: one third of the blocks sends, the next adds, the last puts sums where they belong.
Each chunk of a part has a flag, so that all are at work at once, in both directions of a link.

Who sends numbers has all sums of the call before, so that what it sent for them has been read; who
sends sums has all numbers, from workers which had sums of the call before where they belong. */
extern "C" __global__ void __launch_bounds__(512, 2)
    two_shot_all_reduce(const uint4* send, uint4* received,
                        const __grid_constant__ Workers workers, int rank, int count,
                        long long vectors, long long most_vectors) {
  const unsigned call = count_call(workers.at[rank]);
  wait_for_those_in_front();
  const Exchange all = {workers, rank, count, call, (most_vectors + count - 1) / count};
  const int blocks = gridDim.x / 3, block = blockIdx.x % blocks, role = blockIdx.x / blocks;
  const long long part = (vectors + count - 1) / count;
  const int chunks = blocks * (int)((part + blocks * CHUNK - 1) / (blocks * CHUNK));
  const long long chunk = (part + chunks - 1) / chunks;
  for (int n = block; n < chunks; n += blocks) {
    const long long first = n * chunk, end = first + chunk < part ? first + chunk : part;
    if (role == 1) {
      const long long left = vectors - rank * part;
      all.await(NUMBERS, n);
      all.reduce(send + rank * part, received + rank * part, first, end < left ? end : left);
      all.tell(SUMS, n);
      continue;
    }
    if (role == 2) all.await(SUMS, n);
    for (int step = 1; step < count; ++step) {
      const int peer = (rank + step) % count; /* not all to the same one */
      const long long at = peer * part, left = vectors - at, last = end < left ? end : left;
      if (role == 0)
        all.copy(send + at, all.room(peer, rank, NUMBERS), first, last);
      else
        all.copy(all.room(rank, peer, SUMS), received + at, first, last);
    }
    if (role == 0) all.tell(NUMBERS, n);
  }
}
