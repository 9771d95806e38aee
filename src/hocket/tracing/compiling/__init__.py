"""The compiled form of a step: Inductor's kernels and torch's products as the ops of a plan.

    Captured --request--> text --a process of its own: functional graph, Inductor, C++ compiler--> listing and library
    Captured, listing --compiled--> Captured, whose ops are kernels and calls of torch

Everything of Inductor is imported in that process alone. What goes in and what comes out is text, kept in a folder by
the request's digest, so that the next process has it at once.
"""
