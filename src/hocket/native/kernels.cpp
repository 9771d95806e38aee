// Kernels that were compiled for one step, as ops of the dispatcher (see hocket/tracing/compiling).
//
// A kernel is a C function of an array of pointers. It knows the layout of each tensor, so it is called only with tensors of
// that layout. Buffers that it fills alone are allocated here; the others are given, and some of those are written.

#include <torch/custom_class.h>
#include <torch/library.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>

#include <c10/util/SmallVector.h>

#include <dlfcn.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace {

// It takes the addresses of its arguments.
using Entry = void (*)(void**);

struct Layout {
  std::vector<int64_t> size, stride;
  at::ScalarType dtype;

  bool holds(const at::Tensor& tensor) const {
    if (tensor.scalar_type() != dtype || !tensor.device().is_cpu() || !tensor.sizes().equals(size)) return false;
    const auto strides = tensor.strides();
    for (size_t i = 0; i < size.size(); ++i)
      if (strides[i] != stride[i] && size[i] > 1) return false;
    return true;
  }

  // The offset of its last element from its first one.
  int64_t last() const {
    int64_t found = 0;
    for (size_t i = 0; i < size.size(); ++i)
      if (size[i] > 1) found += (size[i] - 1) * stride[i];
    return found;
  }
};

using LayoutText = std::tuple<std::vector<int64_t>, std::vector<int64_t>, at::ScalarType>;

std::vector<Layout> layouts_of(const std::vector<LayoutText>& texts) {
  std::vector<Layout> found;
  for (const auto& [size, stride, dtype] : texts) {
    TORCH_CHECK(size.size() == stride.size(), "a layout has ", size.size(), " sizes and ", stride.size(), " strides");
    found.push_back({size, stride, dtype});
  }
  return found;
}

// The expected layouts of tensors.
struct Layouts : torch::CustomClassHolder {
  std::vector<Layout> layouts;

  explicit Layouts(const std::vector<LayoutText>& texts) : layouts(layouts_of(texts)) {}

  void expect(const std::string& who, const at::TensorList tensors) const {
    TORCH_CHECK(tensors.size() == layouts.size(), who, ": expected ", layouts.size(), " tensors, got ", tensors.size());
    for (size_t i = 0; i < tensors.size(); ++i)
      TORCH_CHECK(layouts[i].holds(tensors[i]), who, ": tensor ", i, " has not the layout that it was compiled for");
  }
};

struct Kernel : torch::CustomClassHolder {
  std::string symbol;
  std::shared_ptr<void> library;
  Entry function = nullptr;
  Layouts given;
  std::vector<Layout> made;
  std::vector<int64_t> order;    // by argument: its place in `given`, or -1 - its place in `made`
  std::vector<int64_t> offsets;  // by argument: its offset in that tensor, in bytes
  std::vector<int64_t> written;  // places in `given`

  Kernel(const std::string& path, std::string name, std::vector<int64_t> arguments, std::vector<int64_t> behind,
         const std::vector<LayoutText>& read, const std::vector<LayoutText>& fresh, std::vector<int64_t> changed)
      : symbol(std::move(name)), given(read), made(layouts_of(fresh)), order(std::move(arguments)),
        offsets(std::move(behind)), written(std::move(changed)) {
    TORCH_CHECK(offsets.size() == order.size(), symbol, ": ", order.size(), " arguments, ", offsets.size(), " offsets");
    for (size_t i = 0; i < order.size(); ++i) {
      const int64_t place = order[i];
      TORCH_CHECK(place < static_cast<int64_t>(read.size()) && -1 - place < static_cast<int64_t>(fresh.size()), symbol,
                  ": there is no tensor ", place);
      const Layout& layout = place >= 0 ? given.layouts[place] : made[-1 - place];
      TORCH_CHECK(offsets[i] >= 0 && offsets[i] <= layout.last(), symbol, ": argument ", i, " begins behind its tensor");
      offsets[i] *= static_cast<int64_t>(c10::elementSize(layout.dtype));
    }
    for (const int64_t place : written)
      TORCH_CHECK(place >= 0 && place < static_cast<int64_t>(read.size()), symbol, ": there is no tensor ", place);
    // Loaded once for all kernels of a step, and unloaded with the last of them.
    void* loaded = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    TORCH_CHECK(loaded, "a library of kernels cannot be loaded: ", dlerror());
    library.reset(loaded, dlclose);
    function = reinterpret_cast<Entry>(dlsym(loaded, symbol.c_str()));
    TORCH_CHECK(function, path, " has no kernel ", symbol);
  }

  std::vector<at::Tensor> run(const at::TensorList tensors) const {
    given.expect(symbol, tensors);
    std::vector<at::Tensor> results;
    results.reserve(made.size());
    for (const auto& layout : made) results.push_back(at::empty_strided(layout.size, layout.stride, layout.dtype));
    c10::SmallVector<void*, 64> pointers(order.size());
    for (size_t i = 0; i < order.size(); ++i) {
      const at::Tensor& tensor = order[i] >= 0 ? tensors[order[i]] : results[-1 - order[i]];
      pointers[i] = static_cast<char*>(tensor.data_ptr()) + offsets[i];
    }
    function(pointers.data());
    for (const int64_t place : written) tensors[place].unsafeGetTensorImpl()->bump_version();
    return results;
  }
};

std::vector<at::Tensor> kernel(const c10::intrusive_ptr<Kernel>& kernel, at::TensorList given) {
  return kernel->run(given);
}

// The numbers of a step as one vector, after a check that all tensors have the layout that was compiled for.
at::Tensor checked_numbers(const c10::intrusive_ptr<Layouts>& layouts, at::TensorList given, at::ArrayRef<double> numbers) {
  layouts->expect("the compiled step", given);
  auto made = at::empty({static_cast<int64_t>(numbers.size())}, at::kDouble);
  std::copy(numbers.begin(), numbers.end(), made.mutable_data_ptr<double>());
  return made;
}

// A view at an offset of `offset` elements from its base.
at::Tensor part(const at::Tensor& base, at::IntArrayRef size, at::IntArrayRef stride, int64_t offset) {
  return at::as_strided(base, size, stride, base.storage_offset() + offset);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(hocket, library) {
  library.class_<Layouts>("Layouts").def(torch::init<const std::vector<LayoutText>&>());
  library.class_<Kernel>("Kernel").def(
      torch::init<const std::string&, std::string, std::vector<int64_t>, std::vector<int64_t>,
                  const std::vector<LayoutText>&, const std::vector<LayoutText>&, std::vector<int64_t>>());
  library.def("kernel(__torch__.torch.classes.hocket.Kernel kernel, Tensor[] given) -> Tensor[]");
  library.def(
      "checked_numbers(__torch__.torch.classes.hocket.Layouts layouts, Tensor[] given, float[] numbers) -> Tensor");
  library.def("part(Tensor(a) base, int[] size, int[] stride, int offset) -> Tensor(a)");
}

// Not only for the CPU's key: an op may have no tensor among its arguments.
TORCH_LIBRARY_IMPL(hocket, CompositeImplicitAutograd, library) {
  library.impl("kernel", kernel);
  library.impl("checked_numbers", checked_numbers);
  library.impl("part", part);
}
