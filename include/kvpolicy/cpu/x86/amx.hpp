// SPDX-License-Identifier: Apache-2.0
//
// AMX: eight tile registers of 16 rows by 64 bytes, and a product of two of them in bfloat16. Whether a
// process may use them is determined once, at run time, so no compile flag is needed: the few instructions
// are written as assembly, which compiles under all flags, and the compiler generates them nowhere else.
//
// Reference: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, chapter 18.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__)
#define KVPOLICY_CPU_AMX 1
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace kvpolicy::cpu::x86 {

#ifdef KVPOLICY_CPU_AMX

/// The tile registers of the calling thread, from construction to destruction; their contents are undefined
/// at first. Requires `available()`. Any type with this interface can replace it.
class AmxTiles {
 public:
  /// Whether processor and system let this process use tiles. The first call asks the system for
  /// permission; a refusal is not an error.
  [[nodiscard]] static bool available() noexcept {
    static const bool result = has_instructions() && is_permitted();
    return result;
  }

  AmxTiles() noexcept {
    struct alignas(64) Config {
      std::uint8_t palette = 1;
      std::uint8_t start_row = 0;
      std::uint8_t reserved[14] = {};
      std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    };
    static_assert(sizeof(Config) == 64);
    const Config config;
    __asm__ volatile("ldtilecfg %0" : : "m"(config));
  }
  AmxTiles(const AmxTiles&) = delete;
  AmxTiles& operator=(const AmxTiles&) = delete;
  ~AmxTiles() { __asm__ volatile("tilerelease"); }

  template <int Tile>
  void zero() noexcept {
    __asm__ volatile("tilezero %%tmm%c0" : : "i"(Tile));
  }
  /// Loads 16 rows of 64 bytes, `stride` bytes apart.
  template <int Tile>
  void load(const void* from, std::size_t stride) noexcept {
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(Tile) : "memory");
  }
  template <int Tile>
  void store(void* to, std::size_t stride) noexcept {
    __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(Tile) : "memory");
  }
  /// sums[i, x] += sum over p < 16 of the two products of pair a[i, p] and pair b[p, x].
  template <int Sums, int A, int B>
  void add_product() noexcept {
    __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(Sums), "i"(A), "i"(B));
  }

 private:
  [[nodiscard]] static bool has_instructions() noexcept {
    unsigned a = 0;
    unsigned b = 0;
    unsigned c = 0;
    unsigned d = 0;
    constexpr unsigned tiles_and_bfloat16 = 1U << 24 | 1U << 22;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (d & tiles_and_bfloat16) == tiles_and_bfloat16;
  }

  // A process must request the 8 KiB that a thread's tiles take in its signal frames.
  [[nodiscard]] static bool is_permitted() noexcept {
    constexpr long get_permission = 0x1022;      // ARCH_GET_XCOMP_PERM
    constexpr long request_permission = 0x1023;  // ARCH_REQ_XCOMP_PERM
    constexpr long tile_data = 18;               // XFEATURE_XTILEDATA
    if (syscall(SYS_arch_prctl, request_permission, tile_data) != 0) return false;
    std::uint64_t permitted = 0;
    return syscall(SYS_arch_prctl, get_permission, &permitted) == 0 && (permitted >> tile_data & 1) != 0;
  }
};

#else

/// Never available on this target.
class AmxTiles {
 public:
  [[nodiscard]] static bool available() noexcept { return false; }

  template <int Tile>
  void zero() noexcept {}
  template <int Tile>
  void load(const void*, std::size_t) noexcept {}
  template <int Tile>
  void store(void*, std::size_t) noexcept {}
  template <int Sums, int A, int B>
  void add_product() noexcept {}
};

#endif

}  // namespace kvpolicy::cpu::x86
