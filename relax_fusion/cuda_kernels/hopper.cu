// Instructions of Hopper: barriers, copies, clusters, matrices (PTX ISA 8.7, by their names there).
//
// Constants of the kernel are `BLOCKS_THAT_SHARE` and `BLOCKS_THAT_SPLIT`, blocks of its cluster that
// share copies, and that share a sum, and `GROUPS_THAT_SPLIT`, sets of warp groups that share one.

constexpr int LINE = 128;  // bytes: the widest swizzle
constexpr int SPLIT = BLOCKS_THAT_SPLIT * GROUPS_THAT_SPLIT;  // parts of a sum

__device__ __forceinline__ u32 shared_address(const void* pointer) {
  return (u32)__cvta_generic_to_shared(pointer);
}

__device__ __forceinline__ void barrier_init(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
  asm volatile(
      "{\n.reg .pred done;\nagain:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra ready;\nbra again;\nready:\n}" ::"r"(barrier), "r"(parity)
      : "memory");
}

// Arrive at a barrier of this block.
__device__ __forceinline__ void barrier_arrive_here(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrive at the barrier that a block of the cluster has at the same address.
__device__ __forceinline__ void barrier_arrive_there(u32 barrier, u32 rank) {
  asm volatile(
      "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(barrier), "r"(rank)
      : "memory");
}

// Arrive at the barrier of this block, or where blocks share copies, of one of them.
__device__ __forceinline__ void barrier_arrive(u32 barrier, u32 rank) {
  if constexpr (BLOCKS_THAT_SHARE == 1) {
    barrier_arrive_here(barrier);
  } else {
    barrier_arrive_there(barrier, rank);
  }
}

__device__ __forceinline__ void cluster_sync() {
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::
          : "memory");
}

// Copy a box of lines of 128 bytes from element `first` on, to this block or to those whose bits
// are set in `ranks`.
__device__ __forceinline__ void copy(u32 to, const TensorMap& from, int first, int line,
                                     u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3}], [%4];" ::"r"(to),
      "l"(&from), "r"(first), "r"(line), "r"(barrier)
      : "memory");
}

__device__ __forceinline__ void copy_to(u32 to, const TensorMap& from, int first, int line,
                                        u32 barrier, u16 ranks) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
      "l"(&from), "r"(first), "r"(line), "r"(barrier), "h"(ranks)
      : "memory");
}

// The higher word of matrix descriptors (PTX ISA, "Matrix Descriptor Format"): 128-byte swizzle,
// eight lines 1024 bytes after eight lines.
constexpr u32 LAYOUT = 0x40000040;

// The lower word.
__device__ __forceinline__ u32 operand(u32 address) {
  return (address & 0x3FFFF) >> 4 | 1 << 16;
}

// The 32 bits that a block of the cluster has at an address.
__device__ __forceinline__ u32 load_from(u32 address, u32 rank) {
  u32 value;
  asm volatile(
      "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %1, %2;\n"
      "ld.shared::cluster.u32 %0, [there];\n}" : "=r"(value) : "r"(address), "r"(rank) : "memory");
  return value;
}

// The sum of what all sets of warp groups of all blocks of a cluster have, APART in each block.
template <int APART>
__device__ __forceinline__ Sum sum_of_parts(const Sum* first) {
  Sum sum = 0;
  #pragma unroll
  for (int split = 0; split < GROUPS_THAT_SPLIT; ++split) {
    const Sum* from = first + split * APART;
    if constexpr (BLOCKS_THAT_SPLIT == 1) {
      sum += *from;
    } else {
      #pragma unroll
      for (int rank = 0; rank < BLOCKS_THAT_SPLIT; ++rank) {
        const u32 bits = load_from(shared_address(from), rank);
        sum += reinterpret_cast<const Sum&>(bits);
      }
    }
  }
  return sum;
}

// The number of this block in its cluster.
__device__ __forceinline__ int cluster_rank() {
  int rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// The same number, of which nothing is known: what follows from it is not computed ahead.
__device__ __forceinline__ int forget(int number) {
  asm volatile("" : "+r"(number));
  return number;
}

// The same number, which all lanes of a warp have: what follows from it is computed once for them.
__device__ __forceinline__ int of_warp(int number) {
  asm("shfl.sync.idx.b32 %0, %0, 0, 31, 0xFFFFFFFF;" : "+r"(number));
  return number;
}

// Make initialised barriers known to the blocks and to the copies that use them.
__device__ __forceinline__ void barriers_ready() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Wait for all threads that call it: `threads` of this block, a multiple of 32.
template <int THREADS>
__device__ __forceinline__ void threads_sync(int name) {
  asm volatile("bar.sync %0, %1;" ::"r"(name), "n"(THREADS) : "memory");
}

// Count as one of those threads, without waiting.
template <int THREADS>
__device__ __forceinline__ void threads_arrive(int name) {
  asm volatile("bar.arrive %0, %1;" ::"r"(name), "n"(THREADS) : "memory");
}

// Wait until the kernels in front have ended.
__device__ __forceinline__ void wait_for_predecessor() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

// Let the next kernel begin, once all blocks have come here.
__device__ __forceinline__ void release_successor() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// Hand registers back, or take some: all warps of a warp group.
template <int COUNT>
__device__ __forceinline__ void keep_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

template <int COUNT>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// Products read registers and shared memory as they are now.
__device__ __forceinline__ void products_begin() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

// Close a group of products, and wait for all but it and those in front, LEFT together.
template <int LEFT>
__device__ __forceinline__ void products_of_before() {
  asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned %0;" ::"n"(LEFT)
               : "memory");
}

// Load two matrices of 8 x 8 from where lanes 0 to 15 say that their rows lie, or their columns.
template <bool COLUMNS>
__device__ __forceinline__ void load_matrices(u32 address, u32& first, u32& second) {
  if constexpr (COLUMNS) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                 : "=r"(first), "=r"(second) : "r"(address) : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                 : "=r"(first), "=r"(second) : "r"(address) : "memory");
  }
}

template <bool COLUMNS>
__device__ __forceinline__ void store_matrices(u32 address, u32 first, u32 second) {
  if constexpr (COLUMNS) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(address),
                 "r"(first), "r"(second) : "memory");
  } else {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};" ::"r"(address),
                 "r"(first), "r"(second) : "memory");
  }
}

// Store one, whose columns lie there.
__device__ __forceinline__ void store_columns(u32 address, u32 word) {
  asm volatile("stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%0], {%1};" ::"r"(address),
               "r"(word) : "memory");
}

// Load two floats, or store 32 bits twice; TOGETHER, they lie side by side.
template <bool TOGETHER>
__device__ __forceinline__ void load_floats(u32 at, u32 next, float& first, float& second) {
  if constexpr (TOGETHER) {
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(first), "=f"(second) : "r"(at) : "memory");
  } else {
    asm volatile("ld.shared.f32 %0, [%2];\nld.shared.f32 %1, [%3];"
                 : "=&f"(first), "=f"(second) : "r"(at), "r"(next) : "memory");
  }
}

template <bool TOGETHER>
__device__ __forceinline__ void store_words(u32 at, u32 next, u32 first, u32 second) {
  if constexpr (TOGETHER) {
    asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(at), "r"(first), "r"(second) : "memory");
  } else {
    asm volatile("st.shared.b32 [%0], %2;\nst.shared.b32 [%1], %3;" ::"r"(at), "r"(next),
                 "r"(first), "r"(second) : "memory");
  }
}
