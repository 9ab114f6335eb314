// SPDX-License-Identifier: MIT
//
// What Python hands over, read strictly: an argument of another type, shape or range is a
// ValueError that names the field, before the scheduler hears of it. pybind11's own conversions
// would answer with a TypeError that lists signatures, take None for False, and cut 1.5 to 1.
// Called with the GIL held; knows nothing of the scheduler.

#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

namespace tokenspeed {

namespace py = pybind11;
using TokenArray = py::array_t<int32_t, py::array::c_style>;

inline std::string TypeName(const py::handle& given) { return Py_TYPE(given.ptr())->tp_name; }

[[noreturn]] inline void Refuse(const std::string& field, const std::string& wanted,
                                const py::handle& given) {
  throw py::value_error(field + " must be " + wanted + ", got " + TypeName(given));
}

// Anything with __index__, so numpy's integers too, within the range of T.
template <class T>
T Integer(const py::handle& given, const std::string& field) {
  const auto index = py::reinterpret_steal<py::object>(PyNumber_Index(given.ptr()));
  if (!index) {
    PyErr_Clear();
    Refuse(field, "an integer", given);
  }
  int overflow = 0;
  const long long value = PyLong_AsLongLongAndOverflow(index.ptr(), &overflow);
  if (overflow != 0 || value < std::numeric_limits<T>::min() ||
      value > std::numeric_limits<T>::max()) {
    throw py::value_error(field + " does not fit into " + std::to_string(8 * sizeof(T)) +
                          " bits: " + std::string(py::str(index)));
  }
  return static_cast<T>(value);
}

inline bool Flag(const py::handle& given, const std::string& field) {
  if (given.ptr() == Py_True) return true;
  if (given.ptr() == Py_False) return false;
  Refuse(field, "True or False", given);
}

inline std::string Text(const py::handle& given, const std::string& field) {
  if (!py::isinstance<py::str>(given)) Refuse(field, "a string", given);
  return given.cast<std::string>();
}

inline std::vector<int32_t> Integers(const py::handle& given, const std::string& field) {
  if (!py::isinstance<py::list>(given) && !py::isinstance<py::tuple>(given)) {
    Refuse(field, "a list of integers", given);
  }
  std::vector<int32_t> values;
  for (const py::handle& item : given) {
    values.push_back(Integer<int32_t>(item, field + "[" + std::to_string(values.size()) + "]"));
  }
  return values;
}

// A numpy array of bool; None is an empty one.
inline std::vector<uint8_t> Bits(const py::handle& given, const std::string& field) {
  if (given.is_none()) return {};
  if (!py::isinstance<py::array_t<bool, 0>>(given)) Refuse(field, "a numpy array of bool", given);
  const auto array = py::array_t<bool, py::array::c_style>::ensure(given);
  if (array.ndim() != 1) throw py::value_error(field + " must have one dimension");
  return {array.data(), array.data() + array.size()};
}

template <class T>
const T& Instance(const py::handle& given, const std::string& field, const char* name) {
  if (!py::isinstance<T>(given)) Refuse(field, std::string("a ") + name, given);
  return given.cast<const T&>();
}

// The caller's memory where it is contiguous, a copy of it otherwise.
inline TokenArray Tokens(const py::handle& given, const std::string& field, py::ssize_t num_dims,
                         const char* shape) {
  if (!py::isinstance<py::array>(given)) Refuse(field, "a numpy array of int32", given);
  const auto array = py::reinterpret_borrow<py::array>(given);
  if (!py::isinstance<py::array_t<int32_t, 0>>(given)) {
    throw py::value_error(field + " must be a numpy array of int32, got one of " +
                          std::string(py::str(array.dtype())));
  }
  if (array.ndim() != num_dims) {
    throw py::value_error(field + " must be " + shape + ", got " + std::to_string(array.ndim()) +
                          " dimensions");
  }
  if (array.size() > std::numeric_limits<int32_t>::max()) {
    throw py::value_error(field + " has too many elements: " + std::to_string(array.size()));
  }
  return TokenArray::ensure(array);
}

}  // namespace tokenspeed
