// AMX's instructions. Included by amx.h.
#pragma once

#include <sys/syscall.h>
#include <unistd.h>

namespace flyball {

// Linux gives a process the tiles' state only if it asks.
inline bool has_amx() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  static const bool granted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return granted;
}

// GCC's intrinsics are macros that take numbers of tiles as they are written.
namespace tile {

// Before loads, which like the intrinsics do not say that they read memory: what is kept in registers would be written again.
[[gnu::always_inline]] inline void settle_memory() { asm volatile("" ::: "memory"); }

inline void configure(const AmxLayout& layout) { asm volatile("ldtilecfg %0" ::"m"(layout)); }
inline void release() { asm volatile("tilerelease"); }

template <int Tile>
[[gnu::always_inline]] inline void load(const char* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(Tile));
}

template <int Tile>
[[gnu::always_inline]] inline void store(char* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(Tile) : "memory");
}

template <int Tile>
[[gnu::always_inline]] inline void zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(Tile));
}

template <int Sum, int A, int B>
[[gnu::always_inline]] inline void add_bf16() {
  asm volatile("tdpbf16ps %%tmm%c0, %%tmm%c1, %%tmm%c2" ::"i"(B), "i"(A), "i"(Sum));
}

template <int Sum, int A, int B>
[[gnu::always_inline]] inline void add_bytes() {
  asm volatile("tdpbusd %%tmm%c0, %%tmm%c1, %%tmm%c2" ::"i"(B), "i"(A), "i"(Sum));
}

}  // namespace tile
}  // namespace flyball
