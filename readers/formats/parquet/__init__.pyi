from . import parquet_chunks as parquet_chunks
from .parquet_footer import MAX_FOOTER_BYTES as MAX_FOOTER_BYTES, as_file as as_file
from .parquet_footer import parse_footer as parse_footer
from .thrift import I64 as I64, LIST as LIST, STRUCT as STRUCT, ThriftReader as ThriftReader
from .thrift import write_list as write_list, write_number as write_number
from .thrift import write_struct as write_struct, write_text as write_text
