// SPDX-License-Identifier: Apache-2.0
#include <reference_model/library_product.hpp>

#include <kvpolicy/core/error.hpp>

#if defined(KVPOLICY_WITH_ONEDNN)
#include <dnnl.hpp>

#include <array>
#include <map>
#ifdef _OPENMP
#include <omp.h>
#endif
#elif defined(KVPOLICY_WITH_BLAS)
#include <cblas.h>
#else
#error "the reference model needs KVPOLICY_WITH_ONEDNN or KVPOLICY_WITH_BLAS"
#endif

namespace kvpolicy::reference {
namespace {

#if defined(KVPOLICY_WITH_ONEDNN) && defined(_OPENMP)
/// oneDNN divides every product among all threads, however small it is, and within a product the
/// threads wait for each other without sleeping. Beside other programs they may wait for whole time
/// slices, a hundred times the product itself.
class OneThread {
 public:
  OneThread() { omp_set_num_threads(1); }
  OneThread(const OneThread&) = delete;
  OneThread& operator=(const OneThread&) = delete;
  ~OneThread() { omp_set_num_threads(threads_); }

 private:
  int threads_ = omp_get_max_threads();  // of this thread only, so concurrent callers are safe
};
#else
struct OneThread {
  OneThread() {}  // keeps compilers from warning of a variable without a use
};
#endif

}  // namespace

std::string_view matmul_backend() noexcept {
#if defined(KVPOLICY_WITH_ONEDNN)
  return "oneDNN";
#else
  return "BLAS";
#endif
}

void multiply(const MatrixView& a, const MatrixView& b, float scale, float keep, float* out,
              std::size_t stride) {
  const std::size_t rows = a.transposed ? a.columns : a.rows;
  const std::size_t columns = b.transposed ? b.rows : b.columns;
  const std::size_t inner = a.transposed ? a.rows : a.columns;
  const std::size_t other = b.transposed ? b.columns : b.rows;
  require<ShapeError>(inner == other, "multiply: the inner sizes are ", inner, " and ", other,
                      ", they must be the same");
  const OneThread guard;
  // For a single row both libraries take their own path for matrix-vector products.
#if defined(KVPOLICY_WITH_ONEDNN)
  const auto size = [](std::size_t n) { return static_cast<dnnl_dim_t>(n); };
  const dnnl_status_t status = dnnl_sgemm(
      a.transposed ? 'T' : 'N', b.transposed ? 'T' : 'N', size(rows), size(columns), size(inner),
      scale, a.data, size(a.stride), b.data, size(b.stride), keep, out, size(stride));
  require<ShapeError>(status == dnnl_success, "oneDNN refused a product of [", rows, ", ", inner,
                      "] and [", inner, ", ", columns, "]: status ", static_cast<int>(status));
#else
  const auto size = [](std::size_t n) { return static_cast<blasint>(n); };
  cblas_sgemm(CblasRowMajor, a.transposed ? CblasTrans : CblasNoTrans,
              b.transposed ? CblasTrans : CblasNoTrans, size(rows), size(columns), size(inner),
              scale, a.data, size(a.stride), b.data, size(b.stride), keep, out, size(stride));
#endif
}

#if defined(KVPOLICY_WITH_ONEDNN)

bool multiplies_bfloat16() {
  static const bool tiles = [] {
    const auto isa = static_cast<unsigned>(dnnl::get_effective_cpu_isa());
    const auto amx = static_cast<unsigned>(dnnl::cpu_isa::avx512_core_amx);
    return (isa & amx) == amx;
  }();
  return tiles;
}

void multiply_bfloat16(const bfloat16* x, std::size_t rows, const bfloat16* weight,
                       std::size_t outputs, std::size_t inputs, float* out) {
  using dnnl::memory;
  const auto size = [](std::size_t n) { return static_cast<memory::dim>(n); };
  static const dnnl::engine cpu{dnnl::engine::kind::cpu, 0};
  const OneThread guard;
  try {
    // Making a product takes longer than a small product itself. Each thread has products of its own,
    // because one has memory for one caller.
    thread_local dnnl::stream stream{cpu};
    thread_local std::map<std::array<std::size_t, 3>, dnnl::matmul> products;
    const memory::desc in({size(rows), size(inputs)}, memory::data_type::bf16,
                          memory::format_tag::ab);
    // The transpose of [outputs, inputs] as it is stored.
    const memory::desc turned({size(inputs), size(outputs)}, memory::data_type::bf16,
                              memory::format_tag::ba);
    const memory::desc result({size(rows), size(outputs)}, memory::data_type::f32,
                              memory::format_tag::ab);
    const auto [product, is_new] = products.try_emplace({rows, outputs, inputs});
    if (is_new) {
#if DNNL_VERSION_MAJOR >= 3
      product->second = dnnl::matmul{{cpu, in, turned, result}};
#else
      product->second = dnnl::matmul{{{in, turned, result}, cpu}};
#endif
    }
    product->second.execute(
        stream, {{DNNL_ARG_SRC, memory{in, cpu, const_cast<bfloat16*>(x)}},
                 {DNNL_ARG_WEIGHTS, memory{turned, cpu, const_cast<bfloat16*>(weight)}},
                 {DNNL_ARG_DST, memory{result, cpu, out}}});
    stream.wait();
  } catch (const dnnl::error& error) {
    fail<ShapeError>("oneDNN refused a bfloat16 product of [", rows, ", ", inputs, "] and [", inputs,
                     ", ", outputs, "]: ", error.what());
  }
}

#else

bool multiplies_bfloat16() { return false; }

void multiply_bfloat16(const bfloat16*, std::size_t, const bfloat16*, std::size_t, std::size_t,
                       float*) {
  fail<ShapeError>("BLAS has no product of bfloat16");
}

#endif

}  // namespace kvpolicy::reference
