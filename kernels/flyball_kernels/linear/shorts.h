// Products of whole numbers of 16 bits, of bf16 inputs and weights. An instruction adds two of them to each lane, twice as
// many as an fp32 FMA. Included by kernel.cpp, inside its namespace.
#pragma once

constexpr bool has_short_dot() {
#if defined(__AVX512VNNI__)
  return true;
#else
  return false;
#endif
}

constexpr bool has_short_pairs() {
#if defined(__AVX2__)
  return true;
#else
  return false;
#endif
}

// Whether they are faster than fp32. Where AVX-512 has no VNNI, a multiplication and an addition take as long as two FMAs.
constexpr bool prefers_blocks() {
#if defined(__AVX512F__)
  return has_short_dot();
#else
  return has_short_pairs();
#endif
}

// The inputs of a run share a unit, a power of two that gives the largest magnitude so many bits. A step has two features.
template <int32_t Bits>
struct ShortInputs {
  using Value = c10::BFloat16;
  using Weight = uint8_t;
  using Input = uint32_t;
  using Sum = VecI;
  using Scales = RunScales;
  static constexpr int64_t kDepth = 2, kParts = 1, kPlanes = 1, kPairSteps = 0, kTileRows = flyball::kTileRows;
  static constexpr bool kIsUnrolled = true;

  static VecI broadcast(Input x) { return static_cast<int32_t>(x) - VecI{}; }
  static VecI add(VecI sum, VecI w, VecI x) {
#if defined(__AVX512VNNI__)
    return (VecI)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)w, (__m512i)x);
#else
    return add_short_pairs(sum, w, x);
#endif
  }
  static VecI first_sum(const RunInputs&) { return VecI{}; }
  static Vec add_sums(Vec total, const VecI (&sums)[kPlanes], const RunInputs& inputs, Vec scales) {
    return add_product(total, __builtin_convertvector(sums[0], Vec), scales * inputs.unit);
  }

  static void pack(const Value* x, int64_t rows, const RunScales& scales, Input* packed) {
    pack_runs<ShortInputs>(x, rows, scales, packed);
  }

  // The values of a run -> its steps
  static RunInputs round_run(const Value* x, int64_t size, Input* steps, const Runs& runs) {
    typedef int16_t Shorts __attribute__((vector_size(kLanes * sizeof(int16_t))));  // GCC 12 ignores the attribute in a using
    const int32_t most = magnitude_bits(x, size);
    const bool is_finite = most < kInfinity;
    const int32_t exponent = unit_exponent<Bits>(most);
    const float factor = from_exponent(2 * kZeroExponent - exponent);
    VecI total = {};
    for (int64_t j = 0; j < runs.features; j += kLanes) {
      const VecI all = j < size && is_finite ? rounded(x + j, size - j, factor) : VecI{};
      const Shorts shorts = __builtin_convertvector(all, Shorts);
      std::memcpy(steps + j / kDepth, &shorts, std::min(kLanes, runs.features - j) * sizeof(int16_t));
      total += all;
    }
    const float unit = is_finite ? from_exponent(exponent) : std::numeric_limits<float>::quiet_NaN();
    return {unit, 0, static_cast<float>(fold(total, [](auto a, auto b) { return a + b; })) * unit};
  }
};

// bf16 weights, in blocks that share a unit too (block floating point). Weights of at least 1/16 of the largest of their
// block are the same numbers, and inputs of at least 1/32; the others are off by at most 1/4096 or 1/8192 of it, where
// rounding to bf16 had moved the largest itself by up to 1/512. Sums of a block are exact: 64 * 4080 * 8160 fits 32 bits.
struct Blocks : ShortInputs<13> {
  static constexpr int32_t kWeightBits = 12;
  static constexpr int64_t kWidth = kPanel * kDepth * sizeof(int16_t), kMaxFeatures = 64;

  static Runs runs(int64_t k) { return Runs::make<Blocks>(k, kMaxFeatures, false, at::kBFloat16); }  // powers of two
  static Halves<VecI> weights(const Weight* from) { return {load_raw<VecI>(from), load_raw<VecI>(from + kWidth / 2)}; }
};

// weight [n, k] -> panels: for each block the units of the panel's columns, then its steps
inline void pack_blocks(const c10::BFloat16* weight, int64_t n, const Runs& runs, uint8_t* packed) {
  const int64_t num_panels = round_up(n, kPanel) / kPanel, header_bytes = runs.header_bytes();
#pragma omp parallel for
  for (int64_t panel = 0; panel < num_panels; ++panel) {
    uint8_t* to = packed + panel * runs.panel_bytes<Blocks>();
    for (int64_t run = 0; run < runs.num; ++run, to += header_bytes + runs.steps * Blocks::kWidth) {
      for (int64_t i = 0; i < kPanel; ++i) {
        const int64_t of_panel = column_of(runs.scales, i), column = panel * kPanel + of_panel;
        Blocks::Input whole[Blocks::kMaxFeatures / Blocks::kDepth] = {};
        Blocks::Value scale = 0.0f;
        if (column < n) {
          const c10::BFloat16* values = weight + column * runs.k + runs.first(run);
          scale = ShortInputs<Blocks::kWeightBits>::round_run(values, runs.size(run), whole, runs).unit;
        }
        std::memcpy(to + i * sizeof(scale), &scale, sizeof(scale));
        for (int64_t step = 0; step < runs.steps; ++step)
          std::memcpy(to + header_bytes + step * Blocks::kWidth + of_panel * sizeof(whole[step]), &whole[step], sizeof(whole[step]));
      }
    }
  }
}

// Weights of 8 bits in groups, which become 16 in registers. Inputs are those that GroupedBytes has in two planes.
struct GroupedShorts : ShortInputs<15> {
  static constexpr int kBits = 8;
  static constexpr bool kIsSigned = true;
  static constexpr int64_t kWidth = kPanel * kDepth, kMaxFeatures = 256;

  static Halves<VecI> weights(const Weight* from) {
    const auto* bytes = reinterpret_cast<const int8_t*>(from);
    return {widen_bytes(bytes), widen_bytes(bytes + kWidth / 2)};
  }
};
