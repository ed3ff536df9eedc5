// Gather ragged rows into flat batches: plain functions over spans, no Python.
#pragma once
