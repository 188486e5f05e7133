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
  const dnnl_status_t status =
      dnnl_sgemm(a.transposed ? 'T' : 'N', b.transposed ? 'T' : 'N', size(rows), size(columns), size(inner),
                 scale, a.data, size(a.stride), b.data, size(b.stride), keep, out, size(stride));
  require<ShapeError>(status == dnnl_success, "oneDNN refused a product of [", rows, ", ", inner, "] and [",
                      inner, ", ", columns, "]: status ", static_cast<int>(status));
#else
  const auto size = [](std::size_t n) { return static_cast<blasint>(n); };
  cblas_sgemm(CblasRowMajor, a.transposed ? CblasTrans : CblasNoTrans,
              b.transposed ? CblasTrans : CblasNoTrans, size(rows), size(columns), size(inner), scale, a.data,
              size(a.stride), b.data, size(b.stride), keep, out, size(stride));
#endif
}

#if defined(KVPOLICY_WITH_ONEDNN)

namespace {

using dnnl::memory;

const dnnl::engine& cpu() {
  static const dnnl::engine engine{dnnl::engine::kind::cpu, 0};
  return engine;
}

memory::desc matrix(std::size_t rows, std::size_t columns, memory::data_type type, memory::format_tag order) {
  return {{static_cast<memory::dim>(rows), static_cast<memory::dim>(columns)}, type, order};
}

/// y [rows, outputs] = x [rows, inputs] weightᵀ, + y if `add`.
struct Product {
  Product(std::size_t rows, std::size_t outputs, std::size_t inputs, bool add, const memory::desc& weight_in)
      : x{matrix(rows, inputs, memory::data_type::bf16, memory::format_tag::ab)},
        y{matrix(rows, outputs, memory::data_type::f32, memory::format_tag::ab)} {
    dnnl::primitive_attr attributes;
    if (add) {
      dnnl::post_ops sum;
      sum.append_sum();
      attributes.set_post_ops(sum);
    }
#if DNNL_VERSION_MAJOR >= 3
    const dnnl::matmul::primitive_desc found{cpu(), x, weight_in, y, attributes};
#else
    const dnnl::matmul::primitive_desc found{{x, weight_in, y}, attributes, cpu()};
#endif
    weight = found.weights_desc();
    matmul = dnnl::matmul{found};
  }

  memory::desc x, weight, y;
  dnnl::matmul matmul;
};

/// Making a product takes longer than a small product itself. Each thread keeps those that it has made, because
/// one has memory for one caller.
const Product& product_of(std::size_t rows, std::size_t outputs, std::size_t inputs, bool add) {
  thread_local std::map<std::array<std::size_t, 4>, Product> products;
  const std::array<std::size_t, 4> key{rows, outputs, inputs, std::size_t{add}};
  if (const auto found = products.find(key); found != products.end()) return found->second;
  // oneDNN's choice of an order depends on the number of rows, so all products take the same number's choice.
  const bool chooses = rows == PackedWeight::most_rows && !add;
  const memory::desc weight = chooses
                                  ? matrix(inputs, outputs, memory::data_type::bf16, memory::format_tag::any)
                                  : product_of(PackedWeight::most_rows, outputs, inputs, false).weight;
  return products.try_emplace(key, rows, outputs, inputs, add, weight).first->second;
}

/// Runs on the calling thread.
template <class Work>
void run(std::size_t outputs, std::size_t inputs, const Work& work) {
  const OneThread guard;
  try {
    thread_local dnnl::stream stream{cpu()};
    work(stream);
    stream.wait();
  } catch (const dnnl::error& error) {
    fail<ShapeError>("oneDNN refused a bfloat16 product with a weight [", outputs, ", ", inputs,
                     "]: ", error.what());
  }
}

}  // namespace

bool multiplies_bfloat16() {
  static const bool tiles = [] {
    const auto isa = static_cast<unsigned>(dnnl::get_effective_cpu_isa());
    const auto amx = static_cast<unsigned>(dnnl::cpu_isa::avx512_core_amx);
    return (isa & amx) == amx;
  }();
  return tiles;
}

void PackedWeight::pack(const bfloat16* weight, std::size_t outputs, std::size_t inputs) {
  run(outputs, inputs, [&](dnnl::stream& stream) {
    const memory::desc& order = product_of(most_rows, outputs, inputs, false).weight;
    memory from{matrix(inputs, outputs, memory::data_type::bf16, memory::format_tag::ba), cpu(),
                const_cast<bfloat16*>(weight)};
    memory to{order, cpu(), memory_.resize(order.get_size())};
    dnnl::reorder{from, to}.execute(stream, from, to);
  });
  outputs_ = outputs;
  inputs_ = inputs;
}

void PackedWeight::multiply(const bfloat16* x, std::size_t rows, bool add, float* y) const {
  run(outputs_, inputs_, [&](dnnl::stream& stream) {
    const Product& product = product_of(rows, outputs_, inputs_, add);
    const auto over = [](const memory::desc& order, const void* numbers) {
      return memory{order, cpu(), const_cast<void*>(numbers)};
    };
    product.matmul.execute(stream, {{DNNL_ARG_SRC, over(product.x, x)},
                                    {DNNL_ARG_WEIGHTS, over(product.weight, memory_.data())},
                                    {DNNL_ARG_DST, over(product.y, y)}});
  });
}

#else

bool multiplies_bfloat16() { return false; }

void PackedWeight::pack(const bfloat16*, std::size_t, std::size_t) {
  fail<ShapeError>("BLAS has no product of bfloat16");
}

void PackedWeight::multiply(const bfloat16*, std::size_t, bool, float*) const {
  fail<ShapeError>("BLAS has no product of bfloat16");
}

#endif

}  // namespace kvpolicy::reference
