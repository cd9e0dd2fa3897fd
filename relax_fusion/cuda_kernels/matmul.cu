// out[row, feature] = epilogue(sum over k of weight[feature, k] * x[row, k]), for some weights
//
// wgmma multiplies 64 lines of one operand, the tall one, by a multiple of 8 lines of the other, the
// wide one.  Weights are the tall operand, or the wide one where operands are SWAPPED.  One warp
// group copies lines into a ring of stages, by the tensor memory accelerator; the others multiply,
// and carry their sums through shared memory to rows of the result.  A block goes from tile to tile,
// and the copies of the next begin while the last is stored.  Where k is split, a cluster computes
// one tile: each block sums a part of k, and then adds up all parts of some lines.
//
// In front of this text stand the constants of a form, which `text.py` writes:
//   SWAPPED                          whether rows of x are the tall operand
//   REGISTERS                        whether the tall operand goes through registers
//   BLOCK_K, TALL_LINE, TALL_UNITS   elements of k of a stage; bytes and elements that a stage has
//                                    of a line of the tall operand's tensor
//   TURNED                           whether weights are [k, features]; they are tall then
//   TALL, GROUPS_TALL                lines of a tile (of each weight), and warp groups along them
//   WIDE, GROUPS_WIDE                the same of the wide operand
//   TURNS                            2: warp groups take turns at tiles, so that one stores its own
//                                    while the other multiplies
//   STAGES, BLOCKS                   tiles in flight; blocks that a multiprocessor holds
//   CLUSTER_ROWS, CLUSTER_FEATURES   tiles whose blocks are a cluster and share copies
//   BLOCKS_THAT_SHARE, ..._SPLIT     their number; blocks of a cluster that share the sum over k
//   WEIGHTS                          2: gate and up, whose products `epilogue` puts together
//   VECTORS, RESIDUAL                operands of `epilogue` along the features; one of all elements
//   DEPENDENT, EARLY                 launched before its predecessor ends; weights are read then
// and what no template can spell: multiply, settle, epilogue, PARAMETERS, and PRODUCTS made of them.

constexpr int GROUPS = GROUPS_TALL * GROUPS_WIDE;    // of a tile
constexpr int MULTIPLYING = TURNS * GROUPS;
constexpr int BOX = 64 * GROUPS_TALL;                // lines of the tall operand that are copied at once
constexpr int PARTS = TALL / BOX;                    // of a warp group, each of 64 lines
constexpr int WIDE_PART = WIDE / GROUPS_WIDE;        // lines of the wide operand of a warp group
constexpr int SUMS = WIDE_PART / 2;                  // of a thread, for each part
constexpr int TALL_TILES = SWAPPED ? 1 : WEIGHTS, WIDE_TILES = SWAPPED ? WEIGHTS : 1;
constexpr int TALL_BYTES = TALL_TILES * TALL * TALL_LINE;
constexpr int PIECE_BYTES = WIDE_TILES * WIDE * LINE;  // of the wide operand, for 64 elements of k
constexpr int STAGE_BYTES = TALL_BYTES + BLOCK_K / 64 * PIECE_BYTES;
constexpr int ROWS = SWAPPED ? TALL : WIDE, FEATURES = SWAPPED ? WIDE : TALL;
constexpr int CLUSTER = BLOCKS_THAT_SHARE * BLOCKS_THAT_SPLIT;
constexpr int STORED = 32;                           // lines of the wide operand stored at once
constexpr int STORE_BYTES = STORED * 64 * 2;
constexpr int ALL_GROUPS = 15, TURN = 4;             // names of barriers; before: of each warp group
constexpr int WALKED = 8;                            // feature tiles that are walked together

// Where 8 features lie in a tile on its way out, whose lines are rows: without bank conflicts.
__device__ __forceinline__ int place_of(int line, int eighth) {
  return SWAPPED ? line * 64 + ((eighth ^ (line / 2 & 3)) << 4)
                 : line * 128 + ((eighth ^ (line & 7)) << 4);
}

// One of the matmuls of the same rows that a launch computes.
struct Product {
  const TensorMap *weight, *up_weight;
  Number* out;
  const Number *vectors[VECTORS + 1], *residual;
  int features;
  const Number* scales[WEIGHTS];  // of packed weights

  // The operands along the features, of one of them.
  __device__ __forceinline__ void load(float (&to)[VECTORS + 1], int feature) const {
    #pragma unroll
    for (int i = 0; i < VECTORS; ++i) to[i] = number(vectors[i][min(feature, features - 1)]);
  }
};

struct Tile {
  Product product;
  int feature, row;  // the first ones
};

// Copy LINES lines to all WANTING blocks, of which this one copies its share.
template <int LINES, int WANTING, int BYTES = LINE>
__device__ __forceinline__ void copy_lines(u32 to, const TensorMap& from, int k, int line,
                                           u32 barrier, int own, u16 ranks) {
  constexpr int share = LINES / WANTING;
  const int first = own * share;
  if constexpr (WANTING > 1) {
    copy_to(to + first * BYTES, from, k, line + first, barrier, ranks);
  } else {
    copy(to, from, k, line, barrier);
  }
}

extern "C" __global__ void __launch_bounds__(128 * (MULTIPLYING + 1), BLOCKS)
matmul(PARAMETERS) {
  extern __shared__ __align__(1024) unsigned char memory[];
  unsigned char* stores = memory + STAGES * STAGE_BYTES;
  const u32 ring = shared_address(memory);
  const u32 full = shared_address(stores + MULTIPLYING * STORE_BYTES), empty = full + 8 * STAGES;
  const int group = threadIdx.x / 128, thread = threadIdx.x % 128;
  const int warp = thread / 32, lane = thread % 32;
  const int rank = CLUSTER > 1 ? cluster_rank() : 0;

  if (threadIdx.x == 0) {
    for (int stage = 0; stage < STAGES; ++stage) {
      barrier_init(full + 8 * stage, 1);
      // Each warp that multiplies, of each block that shares copies
      barrier_init(empty + 8 * stage, 4 * GROUPS * BLOCKS_THAT_SHARE);
    }
    barriers_ready();
  }
  if constexpr (BLOCKS_THAT_SHARE > 1) {
    cluster_sync();
  } else {
    __syncthreads();
  }

  const Product products[] = {PRODUCTS};
  constexpr int count = sizeof products / sizeof *products;
  auto tiles_of = [](const Product& product) {
    return ceil_div(ceil_div(product.features, FEATURES), CLUSTER_FEATURES);
  };
  int feature_tiles = 0;
  #pragma unroll
  for (int i = 0; i < count; ++i) feature_tiles += tiles_of(products[i]);
  const int row_tiles = ceil_div(ceil_div(rows, ROWS), CLUSTER_ROWS);
  auto tile_of = [&](int index) -> Tile {  // feature tiles are walked a few together
    const int together = WALKED * row_tiles, left = index / together * WALKED;
    const int inside = index % together, width = min(WALKED, feature_tiles - left);
    int feature = left + inside % width, row = inside / width;
    Product product = products[0];
    #pragma unroll
    for (int i = 1, before = tiles_of(products[0]); i < count; before += tiles_of(products[i++]))
      if (left + inside % width >= before) {
        product = products[i];
        feature = left + inside % width - before;
      }
    return {product, (feature * CLUSTER_FEATURES + rank % CLUSTER_FEATURES) * FEATURES,
            (row * CLUSTER_ROWS + rank / CLUSTER_FEATURES % CLUSTER_ROWS) * ROWS};
  };
  const int tiles = feature_tiles * row_tiles, all_steps = ceil_div(k, BLOCK_K);
  const int first = blockIdx.x / CLUSTER, stride = gridDim.x / CLUSTER;
  const int begin = BLOCKS_THAT_SPLIT > 1 ? all_steps * rank / BLOCKS_THAT_SPLIT : 0;
  const int end = BLOCKS_THAT_SPLIT > 1 ? all_steps * (rank + 1) / BLOCKS_THAT_SPLIT : all_steps;

  if (group == MULTIPLYING) {  // this warp group copies
    if constexpr (MULTIPLYING > 1) keep_registers<COPYING_REGISTERS>();
    if (warp == 0 && lane == 0) {
      const int own_feature = rank % CLUSTER_FEATURES, own_row = rank / CLUSTER_FEATURES;
      u16 same_feature = 0, same_row = 0;  // blocks that want the same weights, and the same rows
      for (int i = 0; i < CLUSTER_ROWS; ++i) same_feature |= 1 << (own_feature + i * CLUSTER_FEATURES);
      for (int i = 0; i < CLUSTER_FEATURES; ++i) same_row |= 1 << (own_row * CLUSTER_FEATURES + i);

      auto copy_weights = [&](const Tile& at, int step, u32 to, u32 barrier) {
        #pragma unroll
        for (int i = 0; i < WEIGHTS; ++i) {
          const TensorMap& from = i ? *at.product.up_weight : *at.product.weight;
          if constexpr (SWAPPED) {
            copy_lines<WIDE, CLUSTER_ROWS>(to + TALL_BYTES + i * WIDE * LINE, from, step * BLOCK_K,
                                           at.feature, barrier, own_row, same_feature);
          } else {
            #pragma unroll
            for (int part = 0; part < PARTS; ++part) {
              const u32 there = to + (i * PARTS + part) * BOX * TALL_LINE;
              const int feature = at.feature + part * BOX;
              if constexpr (TURNED) {  // lines of 64 features
                #pragma unroll
                for (int own = 0; own < BOX; own += 64)
                  copy(there + own * LINE, from, feature + own, step * BLOCK_K, barrier);
              } else {
                copy_lines<BOX, CLUSTER_ROWS, TALL_LINE>(there, from, step * TALL_UNITS, feature,
                                                         barrier, own_row, same_feature);
              }
            }
          }
        }
      };
      auto copy_rows = [&](const Tile& at, int step, u32 to, u32 barrier) {
        if constexpr (SWAPPED) {
          #pragma unroll
          for (int part = 0; part < PARTS; ++part)
            copy_lines<BOX, CLUSTER_FEATURES>(to + part * BOX * LINE, x, step * BLOCK_K,
                                              at.row + part * BOX, barrier, own_feature, same_row);
        } else {
          #pragma unroll
          for (int i = 0; i < BLOCK_K / 64; ++i)
            copy_lines<WIDE, CLUSTER_FEATURES>(to + TALL_BYTES + i * PIECE_BYTES, x,
                                               step * BLOCK_K + 64 * i, at.row, barrier,
                                               own_feature, same_row);
        }
      };

      int stage = 0, under_way = 0;
      u32 parity = 1;
      if constexpr (DEPENDENT && EARLY) {  // no kernel in front writes weights
        const Tile at = tile_of(first);
        for (; first < tiles && under_way < min(STAGES, end - begin); ++under_way) {
          const u32 barrier = full + 8 * under_way;
          barrier_expect(barrier, STAGE_BYTES);
          copy_weights(at, begin + under_way, ring + under_way * STAGE_BYTES, barrier);
        }
      }
      if constexpr (DEPENDENT) wait_for_predecessor();
      for (int index = first; index < tiles; index += stride) {
        const Tile at = tile_of(index);
        for (int step = begin; step < end; ++step) {
          const u32 to = ring + stage * STAGE_BYTES, barrier = full + 8 * stage;
          if (under_way > 0) {
            --under_way;
          } else {
            barrier_wait(empty + 8 * stage, parity);
            barrier_expect(barrier, STAGE_BYTES);
            copy_weights(at, step, to, barrier);
          }
          copy_rows(at, step, to, barrier);
          if (++stage == STAGES) stage = 0, parity ^= 1;
        }
      }
      if constexpr (DEPENDENT) release_successor();
    }
    __syncwarp();
    if constexpr (BLOCKS_THAT_SPLIT > 1) cluster_sync();
  } else {  // these multiply
    if constexpr (MULTIPLYING > 1) take_registers<OTHER_REGISTERS>();
    if constexpr (DEPENDENT) wait_for_predecessor();
    const int turn = group / GROUPS, own = group % GROUPS;
    const int tall_group = own % GROUPS_TALL, wide_group = own / GROUPS_TALL;
    unsigned char* store = stores + group * STORE_BYTES;
    float sums[WEIGHTS * PARTS][SUMS];
#if REGISTERS
    constexpr int TALLS = TALL_TILES * PARTS;
    ThroughRegisters<LINES<TALLS, BOX>, TALLS, PARTS, PIECE_BYTES> tall{{tall_group, warp, lane, k}};
#endif
    if (TURNS > 1 && turn > 0) threads_arrive<256>(TURN);
    for (int index = first + turn * stride, number = turn; index < tiles;
         index += TURNS * stride, number += TURNS) {
      const Tile at = tile_of(index);
      if constexpr (RESIDUAL) {  // of this warp group, for it to be near when the sums are there
        constexpr int lines = SWAPPED ? 64 : WIDE_PART, pieces = SWAPPED ? ceil_div(WIDE_PART, 64) : 1;
        for (int i = thread; i < PARTS * lines * pieces; i += 128) {
          const int part = i / (lines * pieces), line = i / pieces % lines;
          const int tall = part * BOX + tall_group * 64, wide = wide_group * WIDE_PART;
          const int row = at.row + (SWAPPED ? tall : wide) + line;
          const int feature = at.feature + (SWAPPED ? wide + i % pieces * 64 : tall);
          if (row < rows && feature < at.product.features)
            prefetch(at.product.residual + (u64)row * at.product.features + feature);
        }
      }
      int stage = number * (end - begin) % STAGES;
      u32 parity = number * (end - begin) / STAGES % 2;
      int before = -1;  // the stage whose products may still be under way
      // A parity tells only the next phase of a stage from the one before: wait for those in front
      if constexpr (TURNS > 1) threads_sync<256>(TURN + turn);
#if REGISTERS
      tall.lines.begin(at.product.scales, at.feature, at.product.features, begin);
#endif
      for (int step = begin; step < end; ++step) {
        barrier_wait(full + 8 * stage, parity);
        const u32 base = ring + stage * STAGE_BYTES;
        const u64 wide = operand(base + TALL_BYTES + wide_group * WIDE_PART * LINE);
        const auto release = [&] {  // all products of the stage before have ended
          if (before >= 0 && lane < BLOCKS_THAT_SHARE) barrier_arrive(empty + 8 * before, lane);
        };
#if REGISTERS
        tall.lines.begin_stage(step, end - 1);
        tall.multiply_stage(sums, memory + stage * STAGE_BYTES, wide, step > begin, release);
#else
        const u64 tall = operand(base + tall_group * 64 * LINE);
        constexpr int tall_step = TURNED ? 16 * LINE >> 4 : 2;  // 16 elements of k, in 16 bytes
        products_begin();
        #pragma unroll
        for (int sixteen = 0; sixteen < BLOCK_K / 16; ++sixteen) {
          #pragma unroll
          for (int i = 0; i < WEIGHTS * PARTS; ++i) {
            const int tall_lines = (SWAPPED ? i % PARTS : i) * BOX;
            const int wide_lines = SWAPPED ? i / PARTS * WIDE : 0;
            multiply(sums[i], tall + (tall_lines * LINE >> 4) + tall_step * sixteen,
                     wide + (wide_lines * LINE >> 4) + 2 * sixteen, step > begin || sixteen > 0);
          }
        }
        products_of_before();
        release();
#endif
        before = stage;
        if (++stage == STAGES) stage = 0, parity ^= 1;
      }
      if constexpr (TURNS > 1) threads_arrive<256>(TURN + 1 - turn);
      #pragma unroll
      for (int i = 0; i < WEIGHTS * PARTS; ++i) settle(sums[i]);
      if (lane < BLOCKS_THAT_SHARE) barrier_arrive(empty + 8 * before, lane);

      if constexpr (BLOCKS_THAT_SPLIT > 1) {  // the ring is free: it takes sums for the other blocks to read
        threads_sync<128 * GROUPS>(ALL_GROUPS);  // all warps have multiplied what is in it
        float* mine = (float*)memory + group * WEIGHTS * PARTS * SUMS * 128 + thread;
        #pragma unroll
        for (int i = 0; i < WEIGHTS * PARTS; ++i) {
          #pragma unroll
          for (int j = 0; j < SUMS; ++j) mine[(i * SUMS + j) * 128] = sums[i][j];
        }
        cluster_sync();
        #pragma unroll
        for (int i = 0; i < WEIGHTS * PARTS; ++i) {
          #pragma unroll
          for (int j = 0; j < SUMS; ++j)
            if (j / 4 % BLOCKS_THAT_SPLIT == rank)
              sums[i][j] = sum_of_blocks(shared_address(mine + (i * SUMS + j) * 128));
        }
      }

      #pragma unroll
      for (int part = 0; part < PARTS; ++part) {
        const int tall_first = (SWAPPED ? at.row : at.feature) + part * BOX + tall_group * 64;
        const int wide_first = (SWAPPED ? at.feature : at.row) + wide_group * WIDE_PART;
        float vectors[2][VECTORS + 1];
        if constexpr (!SWAPPED) {  // the features of this thread are the same in all rows
          #pragma unroll
          for (int i = 0; i < 2; ++i)
            at.product.load(vectors[i], tall_first + 16 * warp + 8 * i + lane / 4);
        }
        #pragma unroll
        for (int top = 0; top < WIDE_PART; top += STORED) {
          // 16 bytes of a row for each thread, twice
          auto for_eighths = [&](auto&& move) {
            #pragma unroll
            for (int i = thread; i < STORE_BYTES / 16; i += 128) {
              const int line = SWAPPED ? i / 4 : i / 8, eighth = SWAPPED ? i % 4 : i % 8;
              const int wide = top + (SWAPPED ? 8 * eighth : line);
              const int row = SWAPPED ? tall_first + line : wide_first + wide;
              const int feature = SWAPPED ? wide_first + wide : tall_first + 8 * eighth;
              const bool own = BLOCKS_THAT_SPLIT == 1 || wide / 8 % BLOCKS_THAT_SPLIT == rank;
              if (own && wide < WIDE_PART && row < rows && feature < at.product.features)
                move(store + place_of(line, eighth), (u64)row * at.product.features + feature);
            }
          };
          if constexpr (RESIDUAL) {
            for_eighths([&](unsigned char* here, u64 there) {
              *(uint4*)here = *(const uint4*)(at.product.residual + there);
            });
            threads_sync<128>(group + 1);
          }
          #pragma unroll
          for (int eight = top / 8; eight < min(top + STORED, WIDE_PART) / 8; ++eight) {
            if (BLOCKS_THAT_SPLIT > 1 && eight % BLOCKS_THAT_SPLIT != rank) continue;
            // Two matrices of 8 x 8 of this warp; features lie across or down
            const int own = lane / 8 % 2, line = SWAPPED ? 16 * warp + 8 * own + lane % 8
                                                         : 8 * eight - top + lane % 8;
            const u32 here = shared_address(
                store + place_of(line, SWAPPED ? eight - top / 8 : 2 * warp + own));
            if constexpr (SWAPPED) {
              #pragma unroll
              for (int i = 0; i < 2; ++i)
                at.product.load(vectors[i], wide_first + 8 * eight + 2 * (lane % 4) + i);
            }
            float added[4] = {}, value[4];
            if constexpr (RESIDUAL) {
              u32 low, high;
              load_matrices<!SWAPPED>(here, low, high);
              unpack(low, added[0], added[1]);
              unpack(high, added[2], added[3]);
            }
            #pragma unroll
            for (int i = 0; i < 4; ++i)
              value[i] = epilogue(sums[part][4 * eight + i],
                                  sums[(WEIGHTS - 1) * PARTS + part][4 * eight + i],
                                  vectors[SWAPPED ? i % 2 : i / 2], added[i]);
            store_matrices<!SWAPPED>(here, pack(value[0], value[1]), pack(value[2], value[3]));
          }
          threads_sync<128>(group + 1);
          for_eighths([&](unsigned char* here, u64 there) {
            *(uint4*)(at.product.out + there) = *(const uint4*)here;
          });
          threads_sync<128>(group + 1);
        }
      }
      // A cluster has one tile; if the sums lived on, wgmma would wait for each other
      if constexpr (BLOCKS_THAT_SPLIT > 1) break;
    }
  }
  if constexpr (CLUSTER > 1) cluster_sync();  // its neighbours use the memory of a block
}
