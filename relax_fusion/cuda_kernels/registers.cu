// The tall operand through registers: a thread makes numbers of what a stage has of its lines, and
// hands them to wgmma, which takes the other operand from shared memory.
//
// Of the 16 lines of a warp a thread has two, `lane / 4` and that and 8, and of eight elements of k
// those from 2 * (lane % 4) on.  PIECE elements of k are made at once, in one of MADE sets of
// registers (`tiles.py` says how many), while products read the others.
//
// `Lines` knows what a line holds:
//   Lines::Taken                         what a thread takes from shared memory, of all lines
//   take(stage, piece, taken)            load a piece
//   numbers(taken, piece, i, to)         make numbers of the piece of tall tile i

constexpr int PIECE = 32, PIECES = BLOCK_K / PIECE;

typedef u32 Fragment[4];  // of a thread, of 16 elements of k: two lines, eight elements, and again

template <class Lines, int TALLS, int WIDE_BYTES>
struct ThroughRegisters {
  Lines lines;
  Fragment made[MADE][TALLS][PIECE / 16];

  // Add a stage to the sums; `release` is called when all products before it have ended.
  template <int SUMS, class Release>
  __device__ __forceinline__ void multiply_stage(float (&sums)[TALLS][SUMS],
                                                 const unsigned char* stage, u32 wide, bool more,
                                                 Release release) {
    typename Lines::Taken taken;
    lines.take(stage, 0, taken);
    #pragma unroll
    for (int piece = 0; piece < PIECES; ++piece) {
      auto& now = made[piece % MADE];
      #pragma unroll
      for (int i = 0; i < TALLS; ++i) lines.numbers(taken, piece, i, now[i]);
      if (piece + 1 < PIECES) lines.take(stage, piece + 1, taken);
      products_begin();
      #pragma unroll
      for (int sixteen = 0; sixteen < PIECE / 16; ++sixteen) {
        #pragma unroll
        for (int i = 0; i < TALLS; ++i) {
          const int k = PIECE * piece + 16 * sixteen;
          const int offset = k / 64 * WIDE_BYTES + k % 64 * 2;
          multiply(sums[i], now[i][sixteen], wide + (offset >> 4),
                   more || piece > 0 || sixteen > 0);
        }
      }
      products_of_before<MADE - 1>();
      if (piece == MADE - 2) release();
    }
  }
};
