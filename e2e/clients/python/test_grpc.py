"""gRPC by grpcio, with the messages that the server's own reflection tells: no code is made for it, and nothing of Gantry's is here."""

import os
import unittest

import grpc
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

PACKAGE = "gantry.inference.v1"


class WithKey(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor, grpc.StreamStreamClientInterceptor):
    """Shows the key with each call."""

    def _with_key(self, go_on, details, asked):
        metadata = list(details.metadata or []) + [("authorization", f"Bearer {os.environ['GANTRY_KEY']}")]
        return go_on(details._replace(metadata=metadata), asked)

    intercept_unary_unary = intercept_unary_stream = intercept_stream_stream = _with_key


class Grpc(unittest.TestCase):
    def setUp(self):
        self.plain = grpc.insecure_channel(os.environ["GANTRY_GRPC"])
        self.channel = grpc.intercept_channel(self.plain, WithKey())
        self.told = ProtoReflectionDescriptorDatabase(self.channel)
        self.pool = DescriptorPool(self.told)

    def tearDown(self):
        self.plain.close()

    def message(self, name, **fields):
        return GetMessageClass(self.pool.FindMessageTypeByName(f"{PACKAGE}.{name}"))(**fields)

    def call(self, method, asked, channel=None, **options):
        described = self.pool.FindServiceByName(f"{PACKAGE}.Inference").methods_by_name[method]
        channel = channel or self.channel
        make = channel.unary_stream if described.server_streaming else channel.unary_unary
        answer = GetMessageClass(described.output_type)
        path = f"/{PACKAGE}.Inference/{method}"
        return make(path, request_serializer=lambda m: m.SerializeToString(), response_deserializer=answer.FromString)(asked, **options)

    def test_a_chat_is_the_same_whole_and_in_events(self):
        asked = self.message("ChatRequest", messages=[{"role": "user", "content": "Which version are you?"}], temperature=0, max_tokens=32)
        whole = self.call("Chat", asked).choices[0].message.content
        events = list(self.call("ChatStream", asked))
        self.assertTrue(whole)
        self.assertEqual("".join(event.token.token for event in events), whole)
        self.assertEqual(events[-1].WhichOneof("event"), "done")
        self.assertGreater(events[-1].done.usage.completion_tokens, 0)

    def test_services_are_told(self):
        self.assertIn(f"{PACKAGE}.Inference", self.told.get_services())

    def test_what_goes_wrong_has_its_status(self):
        wrong = self.message("GenerateRequest", prompt="a", top_p=0)
        long = self.message("GenerateRequest", prompt="0", max_tokens=1500, temperature=0)
        for call, code in [
            (lambda: self.call("Generate", wrong), grpc.StatusCode.INVALID_ARGUMENT),
            (lambda: self.call("Generate", long, channel=self.plain), grpc.StatusCode.UNAUTHENTICATED),
            (lambda: self.call("Generate", long, timeout=0.001), grpc.StatusCode.DEADLINE_EXCEEDED),
        ]:
            with self.assertRaises(grpc.RpcError) as raised:
                call()
            self.assertEqual(raised.exception.code(), code)

    def test_a_stream_can_be_cancelled(self):
        events = self.call("GenerateStream", self.message("GenerateRequest", prompt="0", max_tokens=1500, temperature=0))
        next(events)
        self.assertTrue(events.cancel())
        with self.assertRaises(grpc.RpcError) as raised:
            list(events)
        self.assertEqual(raised.exception.code(), grpc.StatusCode.CANCELLED)


if __name__ == "__main__":
    unittest.main()
