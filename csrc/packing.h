// Packing of sequence lengths into bins: plain functions over spans, no Python.
#pragma once
