// Features that turn by angles of their row (rope): where they are, and what turns eight of them.
//
// Where the features of a pair lie apart, they are those of two weights: a column of a tile is a
// pair, the first WEIGHT has its low feature and the second one its high feature.  Else a column
// is a feature.  Constants of a form:
//   ROTATED       whether features of some products turn
//   HALF          how far the features of a pair lie apart, or 0 where they are neighbours
//   HEAD, WIDTH   features of a head, and how many of them turn, the first ones
//   COLUMNS       angles of a row: WIDTH, or one for each pair
//   Angle         type of their cosines and sines: Number or float

constexpr int ROTATED_AT_ONCE = 16;  // lines of the wide operand that a warp group stores at once

constexpr bool APART = HALF > 0;
constexpr int COLUMNS_OF_PAIR = APART ? 2 : 1;  // features of a column of a tile
constexpr bool BY_PAIR = COLUMNS < WIDTH;
constexpr int SIDES = APART && !BY_PAIR ? 2 : 1;                    // angles for low and high features
constexpr int ANGLE_WORDS = (BY_PAIR && !APART ? 4 : 8) * sizeof(Angle) / 4;  // of 8 columns, on a side

// The feature of a column, the low one of a pair.
__device__ __forceinline__ int feature_of(int column) {
  return APART ? column + column / max(HALF, 1) * HALF : column;
}

// How a product turns: each `period` features begin with `heads` features of heads that do.
struct Rotation {
  const Angle *cos, *sin;  // [positions, COLUMNS]
  int heads, period, positions;
};

// What turns 8 columns of a row.
struct Angles {
  u32 cos[SIDES][ANGLE_WORDS], sin[SIDES][ANGLE_WORDS];
  bool turn;

  __device__ __forceinline__ void load(const Rotation& by, int row, int feature) {
    const int place = feature % by.period, inside = place % HEAD;
    turn = place < by.heads && inside < WIDTH;
    if (!turn) return;
    const u64 first = (u64)(row % by.positions) * COLUMNS + (BY_PAIR && !APART ? inside / 2 : inside);
    #pragma unroll
    for (int side = 0; side < SIDES; ++side) {
      load_words(by.cos + first + side * HALF, cos[side]);
      load_words(by.sin + first + side * HALF, sin[side]);
    }
  }

  __device__ __forceinline__ static float at(const u32 (&words)[ANGLE_WORDS], int i) {
    if constexpr (sizeof(Angle) == 4) {
      return __uint_as_float(words[i]);
    } else {
      return number((Number)(words[i / 2] >> 16 * (i % 2)));
    }
  }

  // Features that stay are not multiplied: an infinite one would make NaN of its partner.
  __device__ __forceinline__ void rotate(float (&values)[COLUMNS_OF_PAIR][8]) const {
    if (!turn) return;
    #pragma unroll
    for (int i = 0; i < 8; i += APART ? 1 : 2) {
      float &low = values[0][i], &high = APART ? values[COLUMNS_OF_PAIR - 1][i] : values[0][i + 1];
      const int first = BY_PAIR && !APART ? i / 2 : i, second = BY_PAIR || APART ? first : i + 1;
      const float x = low, y = high;
      low = x * at(cos[0], first) - y * at(sin[0], first);
      high = y * at(cos[SIDES - 1], second) + x * at(sin[SIDES - 1], second);
    }
  }
};

// Where a column of float32 lies in a tile on its way out, whose lines are rows: without bank
// conflicts, and eight of them side by side.
__device__ __forceinline__ int place_of_rotated(int side, int line, int column) {
  constexpr int lines = SWAPPED ? 64 : ROTATED_AT_ONCE, columns = SWAPPED ? ROTATED_AT_ONCE : 64;
  const int swizzle = SWAPPED ? line / 2 % 2 * 2 : line & 6;
  return (side * lines + line) * columns * 4 + ((column / 4 ^ swizzle) << 4) + column % 4 * 4;
}

// What a thread of a warp group stores of 64 tall lines: their first line and the first wide one.
struct Share {
  unsigned char* store;
  int meeting, thread, part, tall, wide, rows;

  // 8 columns of a row, of the wide lines from `top` on.
  struct Eighth {
    int line, eighth, row, column;
    bool own;
  };
  __device__ __forceinline__ Eighth eighth(int top, int columns) const {
    constexpr int across = SWAPPED ? ROTATED_AT_ONCE / 8 : 8;
    const int line = thread / across, eighth = thread % across;
    const int inside = top + (SWAPPED ? 8 * eighth : line);
    const int row = SWAPPED ? tall + line : wide + inside, column = SWAPPED ? wide + inside : tall + 8 * eighth;
    const bool computed = SPLIT == 1 || inside / 8 % SPLIT == part;
    return {line, eighth, row, column,
            computed && inside < WIDE / GROUPS_WIDE && row < rows && column < columns};
  }
};

// Add biases to the sums of low and of high features, rotate them, and store them.
template <int SUMS, class Product>
__device__ __forceinline__ void store_rotated(const Sum (&low)[SUMS], const Sum (&high)[SUMS],
                                              const Product& product, const Share& share) {
  constexpr int wide_lines = 2 * SUMS, sums = WEIGHTS * TALL / (64 * GROUPS_TALL) * SUMS;
  // Angles are loaded one step ahead, where registers are left for them: 88 are used otherwise
  constexpr int registers = OTHER_REGISTERS > 0 ? OTHER_REGISTERS : 232;
  constexpr bool ahead = BLOCKS == 1 && sums + 2 * SIDES * ANGLE_WORDS + 88 <= registers;
  const int warp = share.thread / 32, lane = share.thread % 32;
  auto angles_of = [&](int top) {
    const auto at = share.eighth(top, product.columns());
    Angles angles = {};  // not left open: ptxas would keep registers for them from the start
    if (at.own) angles.load(product.rotation, at.row, feature_of(at.column));
    return angles;
  };
  float vectors[2][VECTORS + 1];  // of the two columns of this thread
  auto load_vectors = [&](int column, int step) {
    #pragma unroll
    for (int i = 0; i < 2; ++i) product.load(vectors[i], feature_of(column + i * step));
  };
  if constexpr (!SWAPPED) load_vectors(share.tall + 16 * warp + lane / 4, 8);
  Angles next;
  #pragma unroll
  for (int top = 0; top < wide_lines; top += ROTATED_AT_ONCE) {
    if (!ahead || top == 0) next = angles_of(top);
    #pragma unroll
    for (int eight = top / 8; eight < min(top + ROTATED_AT_ONCE, wide_lines) / 8; ++eight) {
      if (SPLIT > 1 && eight % SPLIT != share.part) continue;
      if constexpr (SWAPPED) load_vectors(share.wide + 8 * eight + 2 * (lane % 4), 1);
      #pragma unroll
      for (int i = 0; i < 4 * COLUMNS_OF_PAIR; ++i) {
        const int side = i / 4, j = i % 4;
        const int tall = 16 * warp + 8 * (j / 2) + lane / 4;
        const int wide = 8 * eight - top + 2 * (lane % 4) + j % 2;
        float value = (side ? high : low)[4 * eight + j];
        if constexpr (VECTORS > 0) value += vectors[SWAPPED ? j % 2 : j / 2][side];
        const int place = place_of_rotated(side, SWAPPED ? tall : wide, SWAPPED ? wide : tall);
        *(float*)(share.store + place) = value;
      }
    }
    threads_sync<128>(share.meeting);
    const Angles angles = next;
    if (ahead && top + ROTATED_AT_ONCE < wide_lines) next = angles_of(top + ROTATED_AT_ONCE);
    const auto at = share.eighth(top, product.columns());
    if (at.own) {
      float values[COLUMNS_OF_PAIR][8];
      #pragma unroll
      for (int side = 0; side < COLUMNS_OF_PAIR; ++side) {
        u32 words[8];
        load_words(share.store + place_of_rotated(side, at.line, 8 * at.eighth), words);
        #pragma unroll
        for (int i = 0; i < 8; ++i) values[side][i] = __uint_as_float(words[i]);
      }
      angles.rotate(values);
      Number* const out = product.out + (u64)at.row * product.features + feature_of(at.column);
      #pragma unroll
      for (int side = 0; side < COLUMNS_OF_PAIR; ++side) {
        const auto& own = values[side];
        *(uint4*)(out + side * HALF) = make_uint4(pack(own[0], own[1]), pack(own[2], own[3]),
                                                  pack(own[4], own[5]), pack(own[6], own[7]));
      }
    }
    threads_sync<128>(share.meeting);
  }
}
