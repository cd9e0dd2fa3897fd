// out[row, feature] = epilogue(sum over k of weight[feature, k] * x[row, k]), for some weights
//
// wgmma multiplies 64 lines of one operand, the tall one, by a multiple of 8 lines of the other, the
// wide one.  Weights are the tall operand, or the wide one where operands are SWAPPED.  One warp
// group copies lines into a ring of stages, by the tensor memory accelerator; the others multiply,
// and carry their sums through shared memory to rows of the result.  A block goes from tile to tile,
// and the copies of the next begin while the last is stored.  A residual takes stages of the ring
// behind the last step along k.  Where k is split, a cluster computes one tile: each block, and each
// set of its warp groups, sums a part of k, and then adds up all parts of some lines; the sums take
// the ring, and a residual is read from memory.
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
//   GROUPS_THAT_SPLIT                warp groups that share the sum over k: each takes every so
//                                    many-th stage
//   STAGES, BLOCKS                   tiles in flight; blocks that a multiprocessor holds
//   CLUSTER_ROWS, CLUSTER_FEATURES   tiles whose blocks are a cluster and share copies
//   BLOCKS_THAT_SHARE, ..._SPLIT     their number; blocks of a cluster that share the sum over k
//   WEIGHTS                          2: gate and up, whose products `epilogue` puts together, or
//                                    both features of pairs, which `rotation.cu` turns
//   RUN                              lines of a weight that lie side by side, of those copied at once
//   VECTORS, RESIDUAL                operands of `epilogue` along the features; one of all elements
//   COPIES_RESIDUAL                  whether that comes through the ring
//   DEPENDENT, EARLY                 launched before its predecessor ends; weights are read then
//   ELEMENT_BYTES                    of an element of x and the weights
//   Number, Result, Sum, Value       types: of vectors; of results and residuals; of what wgmma
//                                    adds up; of what `epilogue` returns
//   Unit                             type of the bytes of a row that a thread stores at once: 16, or
//                                    fewer where rows are no multiples of 16 bytes
//   RELEASED                         its successor begins when it does: that waits where it has to
//   ADAPTER_STEPS                    steps behind those of k, whose operands are `narrow` and
//                                    `adapter`; only the narrow one comes from the predecessor
// and what no template can spell: multiply, settle, epilogue, PARAMETERS, and PRODUCTS made of them.

constexpr int LINE_K = LINE / ELEMENT_BYTES;         // elements of k in a line: the widest swizzle
constexpr int GROUPS = GROUPS_TALL * GROUPS_WIDE;    // of a tile
constexpr int MULTIPLYING = TURNS * GROUPS_THAT_SPLIT * GROUPS;
// Of packed gate and up, a warp has eight lines each in its 16: a thread's sums are of both then
constexpr bool INTERLEAVED = REGISTERS && WEIGHTS > 1;
constexpr int PART = INTERLEAVED ? 32 : 64;          // tall lines of a weight, or of rows, in a product
constexpr int BOX = PART * GROUPS_TALL;              // lines of the tall operand that are copied at once
constexpr int PARTS = TALL / BOX;                    // of a warp group
constexpr int SUMMED = INTERLEAVED ? PARTS : WEIGHTS * PARTS;  // products of a warp group
constexpr int WIDE_PART = WIDE / GROUPS_WIDE;        // lines of the wide operand of a warp group
constexpr int SUMS = WIDE_PART / 2;                  // of a thread, for each part
constexpr int TALL_TILES = SWAPPED ? 1 : WEIGHTS, WIDE_TILES = SWAPPED ? WEIGHTS : 1;
constexpr int TALL_BYTES = TALL_TILES * TALL * TALL_LINE;
constexpr int PIECE_BYTES = WIDE_TILES * WIDE * LINE;  // of the wide operand, for LINE_K elements of k
constexpr int STAGE_BYTES = TALL_BYTES + BLOCK_K / LINE_K * PIECE_BYTES;
constexpr int ROWS = SWAPPED ? TALL : WIDE, FEATURES = SWAPPED ? WIDE : TALL;
constexpr int CLUSTER = BLOCKS_THAT_SHARE * BLOCKS_THAT_SPLIT;
constexpr int PASSED_BYTES = 4096;                   // of a warp group, stored at once
constexpr int STORE_BYTES = PASSED_BYTES * COLUMNS_OF_PAIR;
constexpr int STORED = PASSED_BYTES / (PART * sizeof(Result));  // lines of the wide operand
constexpr int STORED_ACROSS = SWAPPED ? STORED : PART;  // features of a row
constexpr int VALUES = INTERLEAVED ? 2 : 4;          // of a thread, in eight wide lines
constexpr bool WORDS = sizeof(Result) == 4;          // results are no halves, as matrices have
constexpr int LANES = 16 / sizeof(Result);           // results in 16 bytes
constexpr int UNIT = sizeof(Unit) / sizeof(Result);  // results that a thread stores at once
constexpr int UNITS = STORE_BYTES / sizeof(Unit) / 128;        // that a thread stores in turn, and
constexpr int AT_ONCE = UNITS / (sizeof(Unit) == 16 ? 1 : 2);  // together: of all, registers spill
constexpr int ALL_GROUPS = 15, TURN = 4;             // names of barriers; before: of each warp group
constexpr int WALKED = 8;                            // feature tiles that are walked together
constexpr int RESIDUAL_BYTES = ROWS * LINE;          // of 64 features
constexpr int RESIDUALS_OF_STAGE = STAGE_BYTES / RESIDUAL_BYTES;
constexpr int RESIDUAL_STEPS =                       // stages of a tile
    COPIES_RESIDUAL ? ceil_div(ceil_div(FEATURES, 64), RESIDUALS_OF_STAGE) : 0;
constexpr bool LATE = DEPENDENT && ADAPTER_STEPS > 0;  // waits when it comes to the narrow operand

// Where 16 bytes lie in a tile on its way out, whose lines are rows: without bank conflicts.
__device__ __forceinline__ int place_of(int line, int piece) {
  constexpr int bytes = STORED_ACROSS * sizeof(Result);
  const int turn = WORDS ? line & (SWAPPED ? 2 : 6) : bytes == 64 ? line / 2 & 3 : line & 7;
  return line * bytes + ((piece ^ turn) << 4);
}

// One of the matmuls of the same rows that a launch computes.
struct Product {
  const TensorMap *weight, *up_weight, *residual_map;
  Result* out;
  const Number* vectors[VECTORS + 1];
  const Result* residual;
  int features;
  const TensorMap *adapter, *narrow;
  const Number* scales[WEIGHTS];  // of packed weights
  Rotation rotation;

  __device__ __forceinline__ int columns() const { return features / COLUMNS_OF_PAIR; }

  // The operands along the features, of one of them.
  __device__ __forceinline__ void load(float (&to)[VECTORS + 1], int feature) const {
    #pragma unroll
    for (int i = 0; i < VECTORS; ++i) to[i] = number(vectors[i][min(feature, features - 1 - HALF)]);
  }
};

struct Tile {
  Product product;
  int feature, row;  // the first ones
};

// Copy LINES lines to all WANTING blocks, of which this one copies its share; of a weight, as boxes
// of lines that lie side by side.
template <int LINES, int WANTING, bool OF_WEIGHT, int BYTES = LINE>
__device__ __forceinline__ void copy_lines(u32 to, const TensorMap& from, int k, int line,
                                           u32 barrier, int own, u16 ranks) {
  constexpr int share = LINES / WANTING, box = OF_WEIGHT ? RUN : share;
  const int first = WANTING > 1 ? own * share : 0;
  #pragma unroll
  for (int i = first; i < first + share; i += box) {
    const int there = OF_WEIGHT ? feature_of(line + i) : line + i;
    if constexpr (WANTING > 1) {
      copy_to(to + i * BYTES, from, k, there, barrier, ranks);
    } else {
      copy(to + i * BYTES, from, k, there, barrier);
    }
  }
}

extern "C" __global__ void __launch_bounds__(128 * (MULTIPLYING + 1), BLOCKS)
matmul(PARAMETERS) {
  extern __shared__ __align__(1024) unsigned char memory[];
  unsigned char* stores = memory + STAGES * STAGE_BYTES;
  const u32 ring = shared_address(memory);
  const u32 full = shared_address(stores + MULTIPLYING * STORE_BYTES), empty = full + 8 * STAGES;
  const int group = GROUPS_THAT_SPLIT > 1 ? of_warp(threadIdx.x / 128) : threadIdx.x / 128;
  const int thread = threadIdx.x % 128;
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
    return ceil_div(ceil_div(product.columns(), FEATURES), CLUSTER_FEATURES);
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
  const int steps_of_k = ceil_div(k, BLOCK_K), all_steps = steps_of_k + ADAPTER_STEPS;
  const int tiles = feature_tiles * row_tiles;
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
        const bool adapted = ADAPTER_STEPS > 0 && step >= steps_of_k;
        if (adapted) step -= steps_of_k;
        #pragma unroll
        for (int i = 0; i < WEIGHTS; ++i) {
          const TensorMap& from =
              *(adapted ? at.product.adapter : i ? at.product.up_weight : at.product.weight);
          if constexpr (SWAPPED) {
            copy_lines<WIDE, CLUSTER_ROWS, true>(to + TALL_BYTES + i * WIDE * LINE, from,
                                                 step * BLOCK_K, at.feature, barrier, own_row,
                                                 same_feature);
          } else {
            #pragma unroll
            for (int part = 0; part < PARTS; ++part) {
              const u32 there = to + (i * PARTS + part) * BOX * TALL_LINE;
              const int feature = at.feature + part * BOX;
              if constexpr (TURNED) {  // lines of 64 features
                #pragma unroll
                for (int own = 0; own < BOX; own += 64)
                  copy(there + own * LINE, from, feature_of(feature + own), step * BLOCK_K, barrier);
              } else {
                copy_lines<BOX, CLUSTER_ROWS, true, TALL_LINE>(there, from, step * TALL_UNITS, feature,
                                                               barrier, own_row, same_feature);
              }
            }
          }
        }
      };
      auto copy_rows = [&](const Tile& at, int step, u32 to, u32 barrier) {
        const bool adapted = ADAPTER_STEPS > 0 && step >= steps_of_k;
        const TensorMap& from = adapted ? *at.product.narrow : x;
        if (adapted) step -= steps_of_k;
        if (LATE && adapted) wait_for_predecessor();
        if constexpr (SWAPPED) {
          #pragma unroll
          for (int part = 0; part < PARTS; ++part)
            copy_lines<BOX, CLUSTER_FEATURES, false>(to + part * BOX * LINE, from, step * BLOCK_K,
                                                     at.row + part * BOX, barrier, own_feature,
                                                     same_row);
        } else {
          #pragma unroll
          for (int i = 0; i < BLOCK_K / LINE_K; ++i)
            copy_lines<WIDE, CLUSTER_FEATURES, false>(to + TALL_BYTES + i * PIECE_BYTES, from,
                                                      step * BLOCK_K + LINE_K * i, at.row, barrier,
                                                      own_feature, same_row);
        }
      };
      auto copy_residual = [&](const Tile& at, int step, u32 to, u32 barrier) {
        constexpr int box = (SWAPPED ? BOX : WIDE) / CLUSTER_FEATURES;  // as that of x
        barrier_expect(barrier, RESIDUALS_OF_STAGE * RESIDUAL_BYTES);
        #pragma unroll
        for (int i = 0; i < RESIDUALS_OF_STAGE; ++i) {
          #pragma unroll
          for (int line = 0; line < ROWS; line += box)
            copy(to + i * RESIDUAL_BYTES + line * LINE, *at.product.residual_map,
                 at.feature + 64 * (step * RESIDUALS_OF_STAGE + i), at.row + line, barrier);
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
      if constexpr (DEPENDENT && !LATE) wait_for_predecessor();
      if constexpr (RELEASED) release_successor();
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
        for (int step = 0; step < RESIDUAL_STEPS; ++step) {
          barrier_wait(empty + 8 * stage, parity);
          copy_residual(at, step, ring + stage * STAGE_BYTES, full + 8 * stage);
          if (++stage == STAGES) stage = 0, parity ^= 1;
        }
      }
      if constexpr (LATE) wait_for_predecessor();
      if constexpr (DEPENDENT && !RELEASED) release_successor();
    }
    __syncwarp();
    if constexpr (BLOCKS_THAT_SPLIT > 1) cluster_sync();
  } else {  // these multiply
    if constexpr (MULTIPLYING > 1) take_registers<OTHER_REGISTERS>();
    if constexpr (DEPENDENT && !LATE) wait_for_predecessor();
    const int set = group / GROUPS, own = group % GROUPS;
    const int turn = TURNS > 1 ? set : 0, split = GROUPS_THAT_SPLIT > 1 ? set : 0;
    const int part_of_k = (BLOCKS_THAT_SPLIT > 1 ? rank * GROUPS_THAT_SPLIT : 0) + split;
    const int tall_group = own % GROUPS_TALL, wide_group = own / GROUPS_TALL;
    unsigned char* store = stores + group * STORE_BYTES;
    Sum sums[SUMMED][SUMS];
#if REGISTERS
    ThroughRegisters<LINES<SUMMED, BOX>, SUMMED, PIECE_BYTES> tall{{tall_group, warp, lane, k}};
#endif
    if (TURNS > 1 && turn > 0) threads_arrive<256>(TURN);
    for (int index = first + turn * stride, number = turn; index < tiles;
         index += TURNS * stride, number += TURNS) {
      const Tile at = tile_of(index);
      const int steps = end - begin + RESIDUAL_STEPS;
      int stage = (number * steps + split) % STAGES;
      u32 parity = (number * steps + split) / STAGES % 2;
      int before = -1;  // the stage whose products may still be under way
      // A parity tells only the next phase of a stage from the one before: wait for those in front
      if constexpr (TURNS > 1) threads_sync<256>(TURN + turn);
#if REGISTERS
      tall.lines.begin(at.product.scales, at.feature, at.product.features, begin + split);
#endif
      for (int step = begin + split; step < end; step += GROUPS_THAT_SPLIT) {
        barrier_wait(full + 8 * stage, parity);
        const u32 base = ring + stage * STAGE_BYTES;
        const u32 wide = operand(base + TALL_BYTES + wide_group * WIDE_PART * LINE);
        const auto release = [&] {  // all products of the stage before have ended
          if (before >= 0 && lane < BLOCKS_THAT_SHARE) barrier_arrive(empty + 8 * before, lane);
        };
#if REGISTERS
        tall.lines.begin_stage(step, end - 1);
        tall.multiply_stage(sums, memory + stage * STAGE_BYTES, wide, step > begin + split,
                            release);
#else
        const u32 tall = operand(base + tall_group * 64 * LINE);
        constexpr int of_k = 32, tall_step = TURNED ? 16 * LINE : of_k;  // bytes of a wgmma
        products_begin();
        #pragma unroll
        for (int slice = 0; slice < LINE / of_k; ++slice) {
          #pragma unroll
          for (int i = 0; i < SUMMED; ++i) {
            const int tall_lines = (SWAPPED ? i % PARTS : i) * BOX;
            const int wide_lines = SWAPPED ? i / PARTS * WIDE : 0;
            multiply(sums[i], tall + (tall_lines * LINE + tall_step * slice >> 4),
                     wide + (wide_lines * LINE + of_k * slice >> 4),
                     step > begin + split || slice > 0);
          }
        }
        products_of_before<1>();
        release();
#endif
        before = stage;
        stage += GROUPS_THAT_SPLIT;
        if (stage >= STAGES) stage -= STAGES, parity ^= 1;
      }
      if constexpr (TURNS > 1) threads_arrive<256>(TURN + 1 - turn);
      #pragma unroll
      for (int i = 0; i < SUMMED; ++i) settle(sums[i]);
      if (lane < BLOCKS_THAT_SHARE) barrier_arrive(empty + 8 * before, lane);
      const int residuals = stage;  // the first stage of the residual
      auto stage_of = [&](int step) {
        return residuals + step - (residuals + step < STAGES ? 0 : STAGES);
      };
      for (int step = 0; step < RESIDUAL_STEPS; ++step) {
        barrier_wait(full + 8 * stage, parity);
        if (++stage == STAGES) stage = 0, parity ^= 1;
      }
      if constexpr (LATE) wait_for_predecessor();  // before anything is written

      if constexpr (SPLIT > 1) {  // the ring is free: it takes sums for others to read
        constexpr int sums_of_group = SUMMED * SUMS * 128;
        threads_sync<128 * MULTIPLYING>(ALL_GROUPS);  // all warps have multiplied what is in it
        Sum* mine = (Sum*)memory + group * sums_of_group + thread;
        const Sum* first_part = (Sum*)memory + own * sums_of_group + thread;
        #pragma unroll
        for (int i = 0; i < SUMMED; ++i) {
          #pragma unroll
          for (int j = 0; j < SUMS; ++j) mine[(i * SUMS + j) * 128] = sums[i][j];
        }
        if constexpr (BLOCKS_THAT_SPLIT > 1) {
          cluster_sync();
        } else {
          threads_sync<128 * MULTIPLYING>(ALL_GROUPS);
        }
        #pragma unroll
        for (int i = 0; i < SUMMED; ++i) {
          #pragma unroll
          for (int j = 0; j < SUMS; ++j)
            if (j / 4 % SPLIT == part_of_k)
              sums[i][j] = sum_of_parts<GROUPS * sums_of_group>(first_part + (i * SUMS + j) * 128);
        }
      }

      #pragma unroll
      for (int part = 0; part < PARTS; ++part) {
        const int tall_first = (SWAPPED ? at.row : at.feature) + part * BOX + tall_group * PART;
        const int wide_first = (SWAPPED ? at.feature : at.row) + wide_group * WIDE_PART;
        float vectors[2][VECTORS + 1];
        if constexpr (!SWAPPED) {  // the features of this thread are the same in all rows
          #pragma unroll
          for (int i = 0; i < VALUES / 2; ++i)
            at.product.load(vectors[i], tall_first + PART / 4 * warp + 8 * i + lane / 4);
        }
        if constexpr (ROTATED) {
          store_rotated(sums[part], sums[SUMMED - PARTS + part], at.product,
                        {store, group + 1, forget(thread), part_of_k, tall_first, wide_first, rows});
        }
        #pragma unroll
        for (int top = ROTATED ? WIDE_PART : 0; top < WIDE_PART; top += STORED) {
          // Units of rows; neighbouring threads have neighbouring ones
          auto for_units = [&](auto&& move) {
            #pragma unroll AT_ONCE
            for (int i = 0; i < UNITS; ++i) {
              constexpr int units = STORED_ACROSS / UNIT;
              const int at_first = sizeof(Unit) == 16 ? thread + 128 * i : thread;
              const int line = at_first / units + (sizeof(Unit) == 16 ? 0 : 128 / units * i);
              const int across = at_first % units * UNIT;
              const int wide = top + (SWAPPED ? across : line);
              const int row = SWAPPED ? tall_first + line : wide_first + wide;
              const int feature = SWAPPED ? wide_first + wide : tall_first + across;
              const bool own = SPLIT == 1 || wide / 8 % SPLIT == part_of_k;
              if (own && wide < WIDE_PART && row < rows && feature < at.product.features)
                move((Unit*)(store + place_of(line, across / LANES)) + across % LANES / UNIT,
                     (u64)row * at.product.features + feature);
            }
          };
          if constexpr (RESIDUAL && RESIDUAL_STEPS == 0) {
            for_units([&](Unit* here, u64 there) {
              *here = *(const Unit*)(at.product.residual + there);
            });
            threads_sync<128>(group + 1);
          }
          #pragma unroll
          for (int eight = top / 8; eight < min(top + STORED, WIDE_PART) / 8; ++eight) {
            if (SPLIT > 1 && eight % SPLIT != part_of_k) continue;
            // Two matrices of 8 x 8 of this warp, or one; features lie across or down
            const int own = VALUES > 2 ? lane / 8 % 2 : 0, line = SWAPPED ? 16 * warp + 8 * own + lane % 8
                                                         : 8 * eight - top + lane % 8;
            const u32 here = shared_address(
                store + place_of(line, SWAPPED ? eight - top / 8 : VALUES / 2 * warp + own));
            if constexpr (SWAPPED) {
              #pragma unroll
              for (int i = 0; i < 2; ++i)
                at.product.load(vectors[i], wide_first + 8 * eight + 2 * (lane % 4) + i);
            }
            auto word_of = [&](int i) {  // where the one of four sums of this thread goes
              const int tall = PART / 4 * warp + lane / 4 + 8 * (i / 2);
              const int wide = 8 * eight - top + 2 * (lane % 4) + i % 2;
              const int row = SWAPPED ? tall : wide, feature = SWAPPED ? wide : tall;
              return shared_address(store + place_of(row, feature / 4) + feature % 4 * 4);
            };
            float added[4] = {};
            Value value[4];
            if constexpr (RESIDUAL && WORDS) {
              #pragma unroll
              for (int i = 0; i < 4; i += 2)
                load_floats<SWAPPED>(word_of(i), word_of(i + 1), added[i], added[i + 1]);
            } else if constexpr (RESIDUAL) {
              u32 low, high, from = here;
              if constexpr (RESIDUAL_STEPS > 0) {
                const int wide = wide_group * WIDE_PART + 8 * eight;
                const int tall = part * BOX + tall_group * 64 + 16 * warp + 8 * own;
                const int row = (SWAPPED ? tall : wide) + lane % 8, feature = SWAPPED ? wide : tall;
                const int stage = stage_of(feature / 64 / RESIDUALS_OF_STAGE);
                from = ring + stage * STAGE_BYTES +
                       feature / 64 % RESIDUALS_OF_STAGE * RESIDUAL_BYTES + row * LINE +
                       ((feature / 8 ^ row) % 8 << 4);
              }
              load_matrices<!SWAPPED>(from, low, high);
              unpack(low, added[0], added[1]);
              unpack(high, added[2], added[3]);
            }
            #pragma unroll
            for (int i = 0; i < VALUES; ++i) {
              const Sum up = INTERLEAVED ? sums[part][4 * eight + 2 + i]
                                         : sums[SUMMED - PARTS + part][4 * eight + i];
              value[i] = epilogue(sums[part][4 * eight + i], up, vectors[SWAPPED ? i % 2 : i / 2],
                                  added[i]);
            }
            if constexpr (WORDS) {
              #pragma unroll
              for (int i = 0; i < VALUES; i += 2)
                store_words<SWAPPED>(word_of(i), word_of(i + 1), bits_of(value[i]),
                                     bits_of(value[i + 1]));
            } else if constexpr (INTERLEAVED) {
              store_columns(here, pack(value[0], value[1]));
            } else {
              store_matrices<!SWAPPED>(here, pack(value[0], value[1]), pack(value[2], value[3]));
            }
          }
          threads_sync<128>(group + 1);
          for_units([&](Unit* here, u64 there) {
            *(Unit*)(at.product.out + there) = *here;
          });
          threads_sync<128>(group + 1);
        }
      }
      for (int step = 0; step < RESIDUAL_STEPS; ++step)
        if (lane < BLOCKS_THAT_SHARE) barrier_arrive(empty + 8 * stage_of(step), lane);
      // A cluster has one tile; if the sums lived on, wgmma would wait for each other
      if constexpr (SPLIT > 1) break;
    }
  }
  if constexpr (CLUSTER > 1) cluster_sync();  // its neighbours use the memory of a block
}
