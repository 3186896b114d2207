"""The tested package that the Inference Workbook's notebooks stand on."""
