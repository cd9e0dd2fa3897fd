// Lines of packed weights, for `ThroughRegisters`: fields of 4 or 8 bits, in order along k, and a
// scale for each GROUP of them.
//
// A field becomes the low bits of a large number, whose distance to zero is then taken off; both are
// exact.  What comes out is multiplied by the scale, and rounded once.  In front stand:
//   GROUP                            elements of k that share a scale; 0: all
//   FIELDS                           which bits of a word are two fields, one in each half
//   LARGE                            what is flipped around them: the large number
//   FACTOR, OFFSET                   (large number) * FACTOR + OFFSET is field - zero
//   ZERO                             of a bfloat16 of 8 bits, which holds no larger number

__device__ __forceinline__ u32 multiply_add_pairs(u32 a, u32 b, u32 c) {
  u32 sums;
  asm("fma.rn." DTYPE "x2 %0, %1, %2, %3;" : "=r"(sums) : "r"(a), "r"(b), "r"(c));
  return sums;
}

// Multiply both by the lower half of a word, or by the higher one.
template <bool HIGHER>
__device__ __forceinline__ u32 multiply_by_half(u32 pair, u32 word) {
  u32 products;
  asm("{\n.reg .b16 half<2>;\n.reg .b32 both;\nmov.b32 {half0, half1}, %2;\n"
      "mov.b32 both, {half%3, half%3};\nmul.rn." DTYPE "x2 %0, %1, both;\n}"
      : "=r"(products) : "r"(pair), "r"(word), "n"((int)HIGHER));
  return products;
}

template <int TALLS, int BOX>
struct PackedLines {
  static constexpr int WORDS = PIECE * TALL_BITS / 32;  // of a line, in a piece
  static constexpr int SCALES = GROUP > 0 && GROUP < BLOCK_K ? BLOCK_K / GROUP : 1;  // in a stage
  static constexpr int SCALE_WORDS = (SCALES + 1) / 2;
  // Of the two lines of a thread in 16, the second is the up's where the first is the gate's
  static constexpr int SECOND = WEIGHTS > 1 ? 0 : 8, SECOND_IN_STAGE = WEIGHTS > 1 ? TALL : 8;
  static constexpr int TURNS_OF = TALL_LINE / 16 - 1;  // of the swizzle as wide as a line
  typedef u32 Taken[TALLS][2][WORDS];

  const Number* scales[WEIGHTS];
  int rows[TALLS][2];  // where those of a line begin
  u32 now[TALLS][2][SCALE_WORDS], next[TALLS][2][SCALE_WORDS];
  int groups, line, place, quarter;  // `place`: of its first word in a stage
  // In registers: as constants they were moved there for each number, and flips were taken apart
  u32 fields, large, factor, offset;

  __device__ __forceinline__ PackedLines(int tall_group, int warp, int lane, int k) {
    groups = GROUP > 0 ? ceil_div(k, GROUP) : 1;
    line = (4 * tall_group + warp) * (WEIGHTS > 1 ? 8 : 16) + lane / 4;
    place = line * TALL_LINE + ((line * TALL_LINE >> 7 & TURNS_OF) << 4);
    quarter = lane % 4;
    const u32 none = k >> 31;
    fields = FIELDS + none, large = LARGE + none, factor = FACTOR + none, offset = OFFSET + none;
  }

  // Begin a tile: ask for the scales of its first step.
  __device__ __forceinline__ void begin(const Number* const (&from)[WEIGHTS], int feature,
                                        int features, int step) {
    #pragma unroll
    for (int i = 0; i < WEIGHTS; ++i) scales[i] = from[i];
    #pragma unroll
    for (int i = 0; i < TALLS; ++i) {
      #pragma unroll
      for (int half = 0; half < 2; ++half)
        rows[i][half] = min(feature + i * BOX + line + SECOND * half, features - 1) * groups;
    }
    ask(step);
  }

  __device__ __forceinline__ void ask(int step) {
    const int group = SCALES > 1 ? step * SCALES : GROUP > 0 ? step * BLOCK_K / GROUP : 0;
    #pragma unroll
    for (int i = 0; i < TALLS; ++i) {
      #pragma unroll
      for (int half = 0; half < 2; ++half) {
        const Number* from = scales[half % WEIGHTS] + rows[i][half] + group;
        if constexpr (SCALES == 1) {
          next[i][half][0] = *from;
        } else {
          load_words(from, next[i][half]);
        }
      }
    }
  }

  // Begin a stage: ask for the scales of the one behind it.
  __device__ __forceinline__ void begin_stage(int step, int last) {
    #pragma unroll
    for (int i = 0; i < TALLS * 2 * SCALE_WORDS; ++i) (&now[0][0][0])[i] = (&next[0][0][0])[i];
    ask(min(step + GROUPS_THAT_SPLIT, last));
  }

  __device__ __forceinline__ void take(const unsigned char* stage, int piece, Taken& taken) const {
    #pragma unroll
    for (int i = 0; i < TALLS; ++i) {
      #pragma unroll
      for (int half = 0; half < 2; ++half) {
        #pragma unroll
        for (int word = 0; word < WORDS; word += 4) {
          const unsigned char* from = stage + (place ^ (piece * WORDS + word) * 4);
          u32 four[4];
          load_words(from + (i * BOX + SECOND_IN_STAGE * half) * TALL_LINE, four);
          #pragma unroll
          for (int j = 0; j < 4; ++j) taken[i][half][word + j] = four[j];
        }
      }
    }
  }

  // Two fields, each in a half of a word, to numbers.
  __device__ __forceinline__ u32 numbers_of(u32 word, u32 scales, bool higher) const {
    const u32 both = (word & fields) ^ large;
    u32 pair;
    if constexpr (TALL_BITS == 8 && DTYPE[0] == 'b') {
      constexpr u32 floats = 0x4B000000;  // 2^23, whose last bit is 1
      constexpr float zero = 8388608.0f + ZERO;
      const float low = __uint_as_float(floats | both & 0xFFFF) - zero;
      const float high = __uint_as_float(floats | both >> 16) - zero;
      pair = pack(low, high);
    } else {
      pair = multiply_add_pairs(both, factor, offset);
    }
    return higher ? multiply_by_half<true>(pair, scales) : multiply_by_half<false>(pair, scales);
  }

  __device__ __forceinline__ void numbers(const Taken& taken, int piece, int i,
                                          Fragment (&to)[PIECE / 16]) const {
    #pragma unroll
    for (int half = 0; half < 2; ++half) {
      const u32(&words)[WORDS] = taken[i][half];
      const int group = SCALES > 1 ? piece * PIECE / GROUP : 0;
      const u32 scales = now[i][half][group / 2];
      #pragma unroll
      for (int sixteen = 0; sixteen < PIECE / 16; ++sixteen) {
        u32 found[2];  // where eight elements are, and the next eight
        const u32* const own = words + 2 * sixteen * (TALL_BITS / 4);
        if constexpr (TALL_BITS == 8) {
          found[0] = __byte_perm(own[0], own[1], 0x1100 + 0x2222 * quarter);
          found[1] = __byte_perm(own[2], own[3], 0x1100 + 0x2222 * quarter);
        } else if constexpr (FIELDS == 0x00F0000F) {  // a byte of each word, twice
          found[0] = __byte_perm(own[0], own[1], 0x4040 + 0x1111 * quarter);
          found[1] = found[0] >> 8;
        } else {
          found[0] = __byte_perm(own[0], own[0] >> 4, 0x4400 + 0x1111 * quarter);
          found[1] = __byte_perm(own[1], own[1] >> 4, 0x4400 + 0x1111 * quarter);
        }
        to[sixteen][half] = numbers_of(found[0], scales, group % 2);
        to[sixteen][2 + half] = numbers_of(found[1], scales, group % 2);
      }
    }
  }
};
