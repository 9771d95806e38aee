// The actions of a lane: operators of the dispatcher, and the recipes of their arguments.

#pragma once

#include <torch/csrc/utils/pybind.h>

#include <ATen/ScalarOps.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "crew.h"
#include "declared.h"

namespace hocket {

using c10::IValue;

// The recipe of one argument of an operator.
struct Argument {
  enum class Kind { constant, slot, number, list } kind = Kind::constant;
  IValue constant;                 // constant; for a list: an empty list of the right type
  int index = -1;                  // slot or number
  bool as_float = false;           // a number for an argument of type float
  bool as_tensor = false;          // a number for an argument of type Tensor, as in mul(tensor, 0.9)
  std::vector<Argument> elements;  // list
};

struct Call {
  c10::OperatorHandle op;
  std::vector<Argument> arguments;
  std::vector<std::pair<int, int>> outs;  // position in the result (-1: the whole) -> slot
  int view = -1;                          // its number, if it is a standing view
};

struct Action {
  std::string label;                            // its mark in a profile
  std::vector<Call> calls;
  int width = 1;                                // threads of its lane
  std::vector<int> cpus;                        // where its lane is pinned
  bool moves = false;                           // the action before it had another lane
  bool grad_mode = false;
  std::vector<int> sleeps;                      // words of ops that use its cores before it
  std::vector<int> waits;                       // words
  int word = -1;                                // its own, if any other action waits for it
  std::vector<int> frees;                       // slots that it reads last
  std::vector<std::pair<int, int>> shared;      // counter, slot: the last of several readers frees it
};

// The work of one thread: a lane, or several that share a core.
struct Worker {
  std::vector<Action> actions;
  std::vector<int64_t> times;  // start and end of each action of the last step
  std::shared_ptr<CrewGroup> group;  // threads that may run it; the first worker's is the caller's
};

inline c10::TypePtr unwrapped(const c10::TypePtr& type) {
  return type->kind() == c10::TypeKind::OptionalType ? type->expectRef<c10::OptionalType>().getElementType() : type;
}

inline bool is_tensor(const c10::TypePtr& type) { return unwrapped(type)->kind() == c10::TypeKind::TensorType; }

// A wrapped number: unlike a tensor, it does not change the type of a tensor beside it.
inline IValue wrapped(const IValue& number) { return at::native::wrapped_scalar_tensor(number.toScalar()); }

// `given` is ("c", value), ("s", slot), ("n", number) or ("l", [the same for each element]).
inline Argument argument_of(const py::tuple& given, const c10::TypePtr& type) {
  const auto kind = given[0].cast<std::string>();
  Argument argument;
  if (kind == "c") {
    argument.constant = is_tensor(type) && PyNumber_Check(given[1].ptr()) && !py::detail::make_caster<at::Tensor>().load(given[1], false)
                            ? wrapped(torch::jit::toIValue(given[1], c10::NumberType::get(), std::nullopt))
                            : torch::jit::toIValue(given[1], type, std::nullopt);
  } else if (kind == "s") {
    argument.kind = Argument::Kind::slot;
    argument.index = given[1].cast<int>();
  } else if (kind == "n") {
    argument.kind = Argument::Kind::number;
    argument.index = given[1].cast<int>();
    argument.as_float = unwrapped(type)->kind() == c10::TypeKind::FloatType;
    argument.as_tensor = is_tensor(type);
  } else {
    argument.kind = Argument::Kind::list;
    const auto element = unwrapped(type)->expectRef<c10::ListType>().getElementType();
    argument.constant = c10::impl::GenericList(element);
    for (const auto& each : given[1].cast<py::list>())
      argument.elements.push_back(argument_of(each.cast<py::tuple>(), element));
  }
  return argument;
}

// `arguments[i]` is as above; None: the default.
inline Call call_of(const std::string& name, const std::string& overload, const py::list& arguments,
                    std::vector<std::pair<int, int>> outs) {
  auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str());
  const auto& schema = op.schema();
  TORCH_CHECK(arguments.size() == schema.arguments().size(), name, ": expected ", schema.arguments().size(),
              " arguments, got ", arguments.size());
  Call call{op, {}, std::move(outs), -1};
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto& formal = schema.arguments()[i];
    if (arguments[i].is_none()) {
      TORCH_CHECK(formal.default_value(), name, ": argument ", formal.name(), " is missing");
      Argument argument;
      argument.constant = *formal.default_value();
      call.arguments.push_back(std::move(argument));
    } else {
      call.arguments.push_back(argument_of(arguments[i].cast<py::tuple>(), formal.type()));
    }
  }
  return call;
}

inline IValue value_of(const Argument& argument, const std::vector<IValue>& slots, const std::vector<IValue>& numbers) {
  switch (argument.kind) {
    case Argument::Kind::constant:
      return argument.constant;
    case Argument::Kind::slot:
      return slots[argument.index];
    case Argument::Kind::number: {
      const IValue& number = numbers[argument.index];
      if (argument.as_float && number.isInt()) return static_cast<double>(number.toInt());
      if (argument.as_tensor) return wrapped(number);
      return number;
    }
    case Argument::Kind::list: {
      auto list = argument.constant.toList().copy();
      list.reserve(argument.elements.size());
      for (const auto& element : argument.elements) list.push_back(value_of(element, slots, numbers));
      return list;
    }
  }
  return {};
}

}  // namespace hocket
