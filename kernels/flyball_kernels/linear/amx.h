// The matrix units of Intel's CPUs (AMX): 16 x 16 sums in a tile register, 32 bf16 features a step.
#pragma once

#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__)
#define FLYBALL_AMX 1

#include <sys/syscall.h>
#include <unistd.h>

#include "../cpu/tensors.h"

namespace flyball {

// Linux gives a process the tiles' state only if it asks.
inline bool may_use_amx() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  static const bool granted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return granted;
}

constexpr int64_t kAmxRows = 16, kAmxStep = 16;  // rows of a tile, pairs of features of a step

// Tiles 0 to 3 hold the sums of up to 32 rows and 32 columns, 4 and 5 the rows' inputs, 6 and 7 the weights.
struct alignas(64) AmxTiles {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {};

  explicit AmxTiles(int64_t num_rows) {
    const uint8_t first = std::min(num_rows, kAmxRows), second = num_rows > kAmxRows ? num_rows - kAmxRows : 1;
    const uint8_t heights[8] = {first, first, second, second, first, second, kAmxRows, kAmxRows};
    std::copy(heights, heights + 8, rows);
  }
};

// sums [rows, 32] of x [rows, steps] pairs and a panel [steps, 32] of pairs; steps is a multiple of kAmxStep. The tiles are
// configured for the rows.
template <bool TwoTiles>
inline void amx_panel(const uint32_t* x, const uint32_t* panel, int64_t steps, float* sums) {
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (TwoTiles) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t step = 0; step < steps; step += kAmxStep) {
    _tile_loadd(6, panel + step * 32, 128);
    _tile_loadd(7, panel + step * 32 + 16, 128);
    _tile_loadd(4, x + step, steps * 4);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (TwoTiles) {
      _tile_loadd(5, x + kAmxRows * steps + step, steps * 4);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, sums, 128);
  _tile_stored(1, sums + 16, 128);
  if constexpr (TwoTiles) {
    _tile_stored(2, sums + kAmxRows * 32, 128);
    _tile_stored(3, sums + kAmxRows * 32 + 16, 128);
  }
}

}  // namespace flyball
#endif
