// SPDX-License-Identifier: Apache-2.0
//
// AVX512-BF16: vdpbf16ps adds the two products of a pair in each of 16 lanes. The functions here name their
// instruction set, so no compile flag is needed; whether the processor has it, and whether it is fast, is
// determined once at run time.
//
// AMD's processors execute a vdpbf16ps in the time of one multiply-add, with twice the work (Zen 4: 230
// instead of 115 GFLOP/s per core). On Intel's Sapphire Rapids it takes almost four times as long (76
// instead of 138). So the instruction is used on AMD's processors only.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>

#include <kvpolicy/cpu/x86/pair_matrices.hpp>

#if defined(__x86_64__) && defined(__GNUC__)
#define KVPOLICY_CPU_BFLOAT16_VECTORS 1
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace kvpolicy::cpu::x86 {

#ifdef KVPOLICY_CPU_BFLOAT16_VECTORS

#define KVPOLICY_CPU_BFLOAT16_TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")))
#define KVPOLICY_CPU_BFLOAT16_INLINE \
  __attribute__((always_inline, target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")))

struct BFloat16Vectors {
  static constexpr std::size_t rows = 8;      ///< of a result that registers hold
  static constexpr std::size_t columns = 32;  ///< or half as many

  /// Whether the processor has the instruction and the system lets it use such vectors.
  [[nodiscard]] static bool available() noexcept {
    static const bool result =
        __builtin_cpu_supports("avx512bf16") != 0 && __builtin_cpu_supports("avx512vl") != 0;
    return result;
  }
  /// Whether it is faster than multiply-adds in float.
  [[nodiscard]] static bool pay() noexcept {
    static const bool result = __builtin_cpu_is("amd") != 0;
    return result && available();
  }

  /// Computes a product for `count` rows, rounded up to `rows`, and `width` columns: 16 or 32. It calls
  /// meanwhile() every Meanwhile::stretch pairs.
  template <class Meanwhile>
  static void product(PairMatrices matrices, ProductTarget target, std::size_t count, std::size_t width,
                      Meanwhile& meanwhile) {
    for (std::size_t row = 0; row < count; row += rows) {
      width == columns ? block<2>(matrices, target, meanwhile) : block<1>(matrices, target, meanwhile);
      matrices.a += rows * matrices.a_row;
      target.c += rows * target.c_row;
    }
  }

 private:
  template <std::size_t N, class F>
  KVPOLICY_CPU_BFLOAT16_INLINE static void unroll(F&& f) {
    [&]<std::size_t... I>(std::index_sequence<I...>) KVPOLICY_CPU_BFLOAT16_INLINE {
      (f(std::integral_constant<std::size_t, I>{}), ...);
    }(std::make_index_sequence<N>{});
  }

  template <std::size_t N, class Meanwhile>
  KVPOLICY_CPU_BFLOAT16_TARGET static void block(const PairMatrices& matrices, const ProductTarget& target,
                                                 Meanwhile& meanwhile) {
    const std::size_t a_row = matrices.a_row;
    __m512 sums[rows][N];
    float* c = target.c;
    const std::size_t c_row = target.c_row;
    const bool onto = target.onto;
    unroll<rows>([&](auto i) KVPOLICY_CPU_BFLOAT16_INLINE {
      unroll<N>([&](auto n) KVPOLICY_CPU_BFLOAT16_INLINE {
        sums[i][n] = onto ? _mm512_loadu_ps(c + i * c_row + n * 16) : _mm512_setzero_ps();
      });
    });
    for (std::size_t term = 0; term < matrices.terms.count; ++term) {
      const std::uint32_t* a = matrices.a + matrices.terms.terms[term].a;
      const std::uint32_t* b = matrices.b + matrices.terms.terms[term].b;
      for (std::size_t pair = 0; pair < matrices.pairs;) {
        meanwhile();
        const std::size_t end = std::min(pair + Meanwhile::stretch, matrices.pairs);
        for (; pair < end; ++pair) {
          __m512i numbers[N];
          unroll<N>([&](auto n)
                        KVPOLICY_CPU_BFLOAT16_INLINE { numbers[n] = _mm512_loadu_si512(b + n * 16); });
          unroll<rows>([&](auto i) KVPOLICY_CPU_BFLOAT16_INLINE {
            const __m512i factor = _mm512_set1_epi32(static_cast<int>(a[i * a_row]));
            unroll<N>([&](auto n) KVPOLICY_CPU_BFLOAT16_INLINE {
              sums[i][n] = _mm512_dpbf16_ps(sums[i][n], reinterpret_cast<__m512bh>(factor),
                                            reinterpret_cast<__m512bh>(numbers[n]));
            });
          });
          a += matrices.a_step;
          b += matrices.b_row;
        }
      }
    }
    unroll<rows>([&](auto i) KVPOLICY_CPU_BFLOAT16_INLINE {
      unroll<N>([&](auto n)
                    KVPOLICY_CPU_BFLOAT16_INLINE { _mm512_storeu_ps(c + i * c_row + n * 16, sums[i][n]); });
    });
  }
};

#else

/// Never available on this target.
struct BFloat16Vectors {
  static constexpr std::size_t rows = 8;

  [[nodiscard]] static bool available() noexcept { return false; }
  [[nodiscard]] static bool pay() noexcept { return false; }

  template <class Meanwhile>
  static void product(const PairMatrices&, const ProductTarget&, std::size_t, std::size_t, Meanwhile&) {}
};

#endif

}  // namespace kvpolicy::cpu::x86
